// The contract of reducing a layout's buckets: over all ranks, to the owners of elements, or by servers elsewhere.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>

#include "comm/communicator.h"
#include "core/ownership.h"

namespace muster {

/// One rank's part of reducing the Buckets of its GradientEngine, window after window. Owned by the replica thread; in
/// backward it is called on autograd's threads, while the replica thread waits.
///
/// A window is open_window(), any number of offer() and take_back() for a bucket before its reduce(), finish() once
/// every bucket's Work is done, and release() where gradients were offered.
class BucketReduction {
 public:
  virtual ~BucketReduction() = default;

  /// Whether gradients may be read where autograd left them: offer() is not called otherwise.
  virtual bool reads_gradients() const noexcept { return false; }

  /// Local, before a window's first gradient: lets go of every gradient, those that hold sums included.
  virtual void open_window() noexcept {}

  /// Local, before the bucket's reduce(). The gradient (the bucket's dtype, the slot's memory order), multiplied by
  /// `factor`, may be read where it is. `is_sole`: nobody else knows its memory. Returns the elements that are: they
  /// need not be packed, and the gradient is kept.
  virtual Run offer(size_t /*parameter*/, const at::Tensor& /*gradient*/, bool /*is_sole*/, double /*factor*/) {
    return {};
  }

  /// An offered gradient, and the elements of it that are in no bucket.
  struct Lent {
    at::Tensor gradient;
    Run run;
    double factor;
  };
  /// Local, before the bucket's reduce(): lets go of an offered gradient. The caller puts its elements into the bucket.
  virtual std::optional<Lent> take_back(size_t /*parameter*/) { return std::nullopt; }

  /// Collective where the reduction is one; does not block. Takes the bucket's sums over the window, which stay as they
  /// are until the Work is done.
  virtual comm::Work reduce(size_t bucket) = 0;

  /// Local, after the Work of every bucket is done: the sums are in Bucket::sums then, or in sum_of().
  virtual void finish() {}

  /// Local, after a collective that peers issued after their finish(): lets go of the gradients that they read, but for
  /// those that hold sums.
  virtual void release() noexcept {}

  /// The gradient in which the sum of a parameter is, until open_window(); undefined where it is in Bucket::sums.
  virtual const at::Tensor& sum_of(size_t /*parameter*/) const noexcept {
    static const at::Tensor in_bucket;
    return in_bucket;
  }

  /// Local, after finish(): this rank has added to its sum of a parameter, which is `sum` as real numbers. Returns
  /// whether peers read something of it: they wait for a barrier before.
  virtual bool note_changed(size_t /*parameter*/, const at::Tensor& /*sum*/) { return false; }
};

}  // namespace muster
