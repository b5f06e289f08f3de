// Moves tensors to other memory, and with them what shares their storage.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>

#include <cstddef>
#include <memory>
#include <utility>

namespace muster {

/// Lets a dense tensor, which stays the same object, lie in the memory of `values`, which has its sizes, dtype and
/// values and is nobody else's. Tensors that share all of its memory (those of `detach()`, say) come along; what else
/// reads the memory where they were, as a NumPy array does, may go on. Of a storage that has more than `dense`, nothing
/// but `dense` moves. `num_known`: tensors of this storage, `dense` among them, by which nobody reads that memory in
/// other ways; it is kept as long as the storage where there are more.
inline void move_to(const at::Tensor& values, const at::Tensor& dense, size_t num_known = 1) {
  const auto& storage = dense.storage();
  const auto& home = values.storage();
  if (storage.nbytes() != home.nbytes() || dense.storage_offset() != 0 || dense.strides() != values.strides()) {
    dense.set_data(values);
    return;
  }
  struct Moved {
    at::DataPtr now;
    at::DataPtr before;
  };
  const bool is_shared = storage.use_count() > num_known;
  auto moved = std::make_unique<Moved>();
  moved->now = home.set_data_ptr({nullptr, home.device()});
  at::DataPtr data(moved->now.get(), moved.get(), [](void* all) { delete static_cast<Moved*>(all); }, home.device());
  auto* const all = moved.release();
  auto before = storage.set_data_ptr(std::move(data));
  if (is_shared) all->before = std::move(before);
}

/// Moves a dense tensor to memory of its own, with its values; see move_to().
inline void give_own_memory(const at::Tensor& dense, size_t num_known = 1) {
  const auto values = at::empty_strided(dense.sizes(), dense.strides(), dense.options().requires_grad(false));
  values.copy_(dense.detach());
  move_to(values, dense, num_known);
}

}  // namespace muster
