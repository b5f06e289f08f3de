#include "device/table.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

#include "device/kernel_status.h"

namespace muster {

void* DeviceBytes::replace(const void* data, size_t bytes, c10::Device device) {
  if (is_capturing(device)) {
    throw InvalidArgument(
        "what a captured step reads (hyperparameters, say, or which parameters have gradients) differs from the last "
        "step's; take one step like it on the same stream before capturing");
  }
  const auto size = static_cast<int64_t>(bytes);
  if (!memory_.defined() || memory_.numel() != size) {
    memory_ = at::empty({size}, at::TensorOptions(at::kByte).device(device));
  }
  auto staging = std::find_if(staging_.begin(), staging_.end(), [&](const Staging& used) {
    return used.memory.numel() == size && used.copied.has_passed();
  });
  if (staging == staging_.end()) {
    staging_.emplace_back();
    staging = std::prev(staging_.end());
    staging->memory = pinned_bytes(bytes, device);
  }
  std::memcpy(staging->memory.mutable_data_ptr(), data, bytes);
  memory_.copy_(staging->memory, /*non_blocking=*/true);
  staging->copied.record(device);
  return memory_.mutable_data_ptr();
}

}  // namespace muster
