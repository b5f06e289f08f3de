// The dtypes of gradients: of those that autograd leaves, and of those that are left in `.grad`.
#pragma once

#include <ATen/core/Tensor.h>

namespace muster {

/// The dtype of a parameter's `.grad`: its grad_dtype, and its own where that is any.
inline at::ScalarType gradient_dtype(const at::Tensor& parameter) {
  return parameter.grad_dtype().value_or(parameter.scalar_type());
}

/// Whether kernels add a gradient of this dtype to sums in `sums`, the parameter's accumulation dtype.
inline bool is_packed_from(at::ScalarType gradient, at::ScalarType sums) noexcept {
  if (sums == at::kDouble) return gradient == at::kDouble;
  return gradient == at::kFloat || gradient == at::kBFloat16 || gradient == at::kHalf;
}

}  // namespace muster
