// Copies of many tensors from one device to others.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "comm/communicator.h"

namespace muster {

/// Copies `from[i]` into `to[i]`, for every i: of its sizes, dtype and strides, all `to` on one device and all `from`
/// on one. A copy between devices costs the host the same however small it is, so small tensors travel together: their
/// number adds no copy until they are 32 MiB. Ordered by the current streams of both devices, and waits for nothing.
void copy_packed(const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to);

/// Likewise from one device to all others by broadcasts: tensors[r][i] is rank r's, and becomes that of rank 0. `ranks`
/// are the handles of a whole group, whose collectives ask nothing of other threads. Waits until each broadcast is on
/// its streams. Throws as Work::wait.
void broadcast_packed(const std::vector<std::vector<at::Tensor>>& tensors,
                      const std::vector<comm::CommunicatorPtr>& ranks);

}  // namespace muster
