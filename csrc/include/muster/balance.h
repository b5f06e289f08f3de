// Balance: how large the parts of a batch are.
#pragma once

namespace muster {

/// How a batch is divided over the replicas of a process: into contiguous parts in replica order, whatever their sizes.
enum class Balance {
  /// Sizes differ by at most one, larger first.
  equal,
  /// Sizes are such that replicas finish together. Equal at first; each replica's time for forward and backward of its
  /// part, without what it waited for others, is measured over a few steps after one to warm up, and again as training
  /// goes on. Sizes change where the step is expected to take at least 5 % less time; a batch that was read before
  /// keeps its parts. Gradients stay the exact mean, but sums of parts of other sizes round otherwise, so that bits are
  /// equal to those of other strategies, and from run to run, while parts are equal.
  automatic,
};

}  // namespace muster
