// The tail: numbers of a window that every replica needs the sums of.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

namespace muster {

inline bool is_floating(const at::Tensor& tensor) { return at::isFloatingType(tensor.scalar_type()); }

/// Whether replicas agree on a buffer by its mean; else they agree on the largest value.
inline bool is_averaged(const at::Tensor& buffer) { return is_floating(buffer) || buffer.is_complex(); }

/// A view of the doubles from `first` on, shaped like as_real() of a buffer.
inline at::Tensor doubles_like(const at::Tensor& buffer, double* first) {
  auto sizes = buffer.sizes().vec();
  if (buffer.is_complex()) sizes.push_back(2);
  return at::from_blob(first, sizes, at::kDouble);
}

/// A view of a 1-dim fp64 tensor on the host (weights are exact to 2^53): the fields; by replica the first parameter
/// that was not finite, plus 1; by replica the digest of its worker's Agreement; by replica, where they work on
/// streams, the digest of its buffers' sizes; whether an Agreement has writes; counts of dense and of sparse gradients
/// by parameter; by buffer whether it was written; then `extra`, the values of averaged buffers times their weight.
/// Where replicas work on streams the tail holds what the host knows: `weight` counts contributions like that field,
/// floating buffers are never noted as written, and `extra` is how many replicas noted each agreed metric.
struct Tail {
  enum Field : int64_t {
    weight = kernels::kWeight,
    weighted_loss = kernels::kWeightedLoss,
    contributions = kernels::kContributions,
    failures = kernels::kFailures,
    stops = kernels::kStops,
    metrics = kernels::kMetrics,
    mean_losses = kernels::kMeanLosses,
    sum_losses = kernels::kSumLosses,
    hooks = kernels::kTailFields,  ///< replicas whose optimizers have hooks to call before the step
    fields
  };

  at::Tensor tensor;
  int64_t replicas = 0;
  int64_t parameters = 0;
  int64_t num_buffers = 0;

  /// All zeros.
  static Tail make(int replicas, size_t parameters, size_t num_buffers, int64_t num_extra) {
    Tail tail{{}, replicas, static_cast<int64_t>(parameters), static_cast<int64_t>(num_buffers)};
    const int64_t size = fields + numbers_of(tail.replicas) + 2 * tail.parameters + tail.num_buffers + num_extra;
    tail.tensor = at::zeros({size}, at::kDouble);
    return tail;
  }

  double* data() const { return static_cast<double*>(tensor.mutable_data_ptr()); }
  double& operator[](Field field) const { return data()[field]; }
  double& non_finite(int64_t replica) const { return data()[fields + replica]; }
  double& digest(int64_t replica) const { return data()[fields + replicas + replica]; }
  double& sizes(int64_t replica) const { return data()[fields + 2 * replicas + replica]; }
  double& writes() const { return data()[fields + 3 * replicas]; }
  static constexpr int64_t numbers_of(int64_t num_replicas) { return 3 * num_replicas + 1; }
  double* counts() const { return data() + fields + numbers_of(replicas); }
  double* sparse_counts() const { return counts() + parameters; }
  double* written() const { return counts() + 2 * parameters; }
  double* extra() const { return written() + num_buffers; }
};

}  // namespace muster
