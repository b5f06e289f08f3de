// Buffers of the local replicas (batch norm's running statistics, say), merged over replicas by the host.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "window/parameter_registry.h"
#include "window/tail.h"

namespace muster {

/// Floating and complex buffers become their mean by weight, all others the largest value, where a replica wrote them.
/// Functions that take a replica are called by its thread in a step, all others by the stepping thread.
class HostBuffers {
 public:
  /// `merges`: false where there is one replica, whose buffers stay as they are.
  HostBuffers(ParameterRegistry& registry, size_t local_replicas, bool merges)
      : registry_(registry), merges_(merges), noted_(local_replicas), integers_(local_replicas) {}

  /// Takes what the next window compares with, unless it was taken at the last window's end.
  void open();

  /// How many numbers averaged buffers add to a tail.
  int64_t num_doubles(size_t replica) const;
  /// Notes what the replica wrote since the last window, and its averaged buffers times `share` where that is above 0.
  void fill(const Tail& tail, size_t replica, double share) const;
  /// All other buffers, one after the other; int64, a copy.
  at::Tensor integers_of(size_t replica) const;
  /// The same after their reduction, for merge().
  void set_integers(size_t replica, at::Tensor integers) { integers_[replica] = std::move(integers); }
  /// What set_integers() was given.
  const at::Tensor& reduced_integers(size_t replica) const noexcept { return integers_[replica]; }

  /// Gives every replica what the tail and replica 0's set_integers() say, averages divided by `divisor`. Buffers that
  /// nobody wrote stay as they are, unless `adopts`; so do expanded ones, which nobody can write.
  void merge(const Tail& tail, double divisor, bool adopts);

 private:
  /// A buffer as the last window left it. Its values are kept because batch norm writes running statistics without
  /// touching their version counter.
  struct Noted {
    at::Tensor buffer;
    int64_t version;
    at::Tensor values;
  };

  const std::vector<at::Tensor>& shared_buffers(size_t replica) const;
  void note();
  bool was_written(size_t replica, size_t buffer) const;

  ParameterRegistry& registry_;
  const bool merges_;
  std::vector<std::vector<Noted>> noted_;  // [local replica][buffer]
  std::vector<at::Tensor> integers_;       // by local replica
  bool is_noted_ = false;
};

}  // namespace muster
