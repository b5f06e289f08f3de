// The tail: numbers of a window that every replica needs the sums of.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

#include <cstdint>

#include "kernels/kernels.h"
#include "window/gradient_set.h"

namespace muster {

inline bool is_floating(const at::Tensor& tensor) { return at::isFloatingType(tensor.scalar_type()); }

/// Whether replicas agree on a buffer by its mean; on the largest where not.
inline bool is_averaged(const at::Tensor& buffer) { return is_floating(buffer) || buffer.is_complex(); }

/// How many doubles hold a buffer.
inline int64_t num_doubles(const at::Tensor& buffer) { return buffer.numel() * (buffer.is_complex() ? 2 : 1); }

/// A view of the doubles from `first` on, like as_real() of a buffer.
inline at::Tensor doubles_like(const at::Tensor& buffer, double* first) {
  auto sizes = buffer.sizes().vec();
  if (buffer.is_complex()) sizes.push_back(2);
  return at::from_blob(first, sizes, at::kDouble);
}

/// A view. fp64, so that weights are exact to 2^53: the fields, by replica the first parameter that was not finite,
/// by replica the digest of its worker's Agreement and whether that has writes, counts of dense and of sparse gradients
/// by parameter, by buffer whether it was written, buffers that are averaged. Where replicas work on streams it holds
/// what the host knows: `weight` counts contributions like that field, floating buffers are never noted as written, and
/// how many replicas noted each agreed metric stands in their values' place.
struct GradientSet::Tail {
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
  int64_t replicas;
  int64_t parameters;
  int64_t num_buffers;

  double* data() const { return static_cast<double*>(tensor.mutable_data_ptr()); }
  double& operator[](Field field) const { return data()[field]; }
  double& non_finite(int64_t replica) const { return data()[fields + replica]; }
  double& digest(int64_t replica) const { return data()[fields + replicas + replica]; }
  double& writes() const { return data()[fields + 2 * replicas]; }
  static constexpr int64_t numbers_of(int64_t num_replicas) { return 2 * num_replicas + 1; }
  double* counts() const { return data() + fields + numbers_of(replicas); }
  double* written() const { return counts() + 2 * parameters; }
  double* extra() const { return written() + num_buffers; }
};

}  // namespace muster
