// Copies of many tensors from one device to another.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace muster {

/// Copies `from[i]` into `to[i]`, for every i: of its sizes, dtype and strides, all `to` on one device and all `from`
/// on one. A copy between devices costs the host the same however small it is, so small tensors travel together: their
/// number adds no copy until they are 32 MiB. Ordered by the current streams of both devices, and waits for nothing.
void copy_packed(const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to);

}  // namespace muster
