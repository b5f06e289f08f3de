#include "device/table.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "device/kernel_status.h"

namespace muster {

namespace {

constexpr size_t kLeastCapacity = 256;  // bytes
constexpr size_t kKept = 4;             // pieces of host memory that no copy reads

size_t capacity_for(size_t bytes) { return std::bit_ceil(std::max(bytes, kLeastCapacity)); }

bool has_room(const at::Tensor& memory, size_t bytes) {
  return memory.defined() && static_cast<size_t>(memory.numel()) >= bytes;
}

}  // namespace

void GraphMemory::reserve(size_t bytes, c10::Device device) {
  if (has_room(memory_, bytes)) return;
  leave_to_graphs();
  memory_ = at::Tensor();  // first, for the room that it has
  memory_ = at::empty({static_cast<int64_t>(capacity_for(bytes))}, at::TensorOptions(at::kByte).device(device));
}

void GraphMemory::leave_to_graphs() {
  if (!is_in_graph_) return;
  of_graphs_.push_back(memory_);
  memory_ = at::Tensor();
  is_in_graph_ = false;
}

void GraphMemory::note_launch(c10::Device device) { is_in_graph_ = is_in_graph_ || is_capturing(device); }

void* DeviceBytes::replace(const void* data, size_t bytes, c10::Device device) {
  if (is_capturing(device)) {
    throw InvalidArgument(
        "what a captured step reads (hyperparameters, say, or which parameters have gradients) differs from the last "
        "step's; take one step like it on the same stream before capturing");
  }
  const auto size = static_cast<int64_t>(bytes);
  memory_.leave_to_graphs();
  memory_.reserve(bytes, device);
  auto& staging = staging_for(bytes, device);
  std::memcpy(staging.memory.mutable_data_ptr(), data, bytes);
  memory_.tensor().narrow(0, 0, size).copy_(staging.memory.narrow(0, 0, size), /*non_blocking=*/true);
  staging.copied.record(device);
  return memory_.data();
}

DeviceBytes::Staging& DeviceBytes::staging_for(size_t bytes, c10::Device device) {
  const auto is_free = [](const Staging& staging) { return staging.copied.has_passed(); };
  // Of many pieces, those of the most copies under way at a time, the smallest go.
  if (staging_.size() > kKept) {
    auto spare = static_cast<size_t>(std::count_if(staging_.begin(), staging_.end(), is_free));
    for (auto staging = staging_.begin(); spare > kKept && staging != staging_.end();) {
      const bool goes = is_free(*staging);
      spare -= goes ? 1 : 0;
      staging = goes ? staging_.erase(staging) : std::next(staging);
    }
  }
  const auto fits = [&](const Staging& staging) { return has_room(staging.memory, bytes) && is_free(staging); };
  const auto found = std::find_if(staging_.begin(), staging_.end(), fits);
  if (found != staging_.end()) return *found;
  const auto has_more = [&](const Staging& staging) { return has_room(staging.memory, bytes); };
  const auto added = staging_.emplace(std::find_if(staging_.begin(), staging_.end(), has_more));
  added->memory = pinned_bytes(capacity_for(bytes), device);
  return *added;
}

}  // namespace muster
