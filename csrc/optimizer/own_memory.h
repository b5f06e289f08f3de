// Tensors that leave memory which other processes write.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>

namespace muster {

/// Moves a dense tensor, which stays the same object, to memory of its own, with its values.
inline void give_own_memory(const at::Tensor& dense) {
  const auto values = dense.detach();
  dense.set_data(at::empty_strided(values.sizes(), values.strides(), values.options()).copy_(values));
}

}  // namespace muster
