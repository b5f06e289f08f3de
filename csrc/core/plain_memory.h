// Tensors whose memory is read as it is: by kernels, by peers, by a socket or a file.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

namespace muster {

/// Whether a tensor's values are not what stands in its memory: a conjugate or a negation that torch left to whoever
/// reads it, or zeros that have no memory.
inline bool is_lazy(const at::Tensor& tensor) noexcept {
  constexpr c10::DispatchKeySet kLazy(
      {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
  return tensor.defined() && tensor.key_set().has_any(kLazy);
}

/// The tensor, or, where it is lazy, its values in memory of their own. Differentiable.
inline at::Tensor in_plain_memory(const at::Tensor& tensor) {
  if (!is_lazy(tensor)) return tensor;
  if (tensor._is_zerotensor()) return at::zeros(tensor.sizes(), tensor.options().requires_grad(false));
  return tensor.resolve_conj().resolve_neg();
}

/// Real numbers in a tensor: a complex one has two an element.
inline int64_t num_reals(const at::Tensor& tensor) { return tensor.numel() * (tensor.is_complex() ? 2 : 1); }

/// A view whose elements are real: of complex values their real and imaginary parts, in one more dimension.
inline at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(in_plain_memory(tensor)) : tensor;
}

}  // namespace muster
