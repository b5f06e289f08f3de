// Segments: what a kernel's launch works on, in a device's memory.
#pragma once

#include <cstdint>
#include <vector>

#include "device/table.h"
#include "kernels/cuda/cuda_kernels.h"

namespace muster {

/// Items of n elements (PackSlot, StatsSegment, StepSegment, MeanSegment) and the chunks of all of them. Owned by one
/// thread; copies are ordered by its current stream.
template <class Item>
class DeviceSegments {
 public:
  /// Makes the device's tables those of `items`, for a launch.
  void follow(const std::vector<Item>& items, c10::Device device) {
    if (!is_complete_ || !items_.holds(items)) replace(items, device);
    items_.note_launch(device);
    chunks_.note_launch(device);
  }

  const Item* items() const { return items_.data(); }
  uint32_t num_items() const noexcept { return num_items_; }
  const kernels::cuda::Chunk* chunks() const { return chunks_.data(); }
  uint32_t num_chunks() const noexcept { return num_chunks_; }

 private:
  void replace(const std::vector<Item>& items, c10::Device device) {
    is_complete_ = false;
    size_t tiles = 0;
    for (const auto& item : items) tiles += kernels::num_tiles(item.n);
    std::vector<kernels::cuda::Chunk> chunks(tiles);
    auto* next = chunks.data();
    for (size_t i = 0; i < items.size(); ++i) {
      next = kernels::cuda::list_chunks(next, static_cast<uint32_t>(i), items[i].n);
    }
    chunks_.follow(chunks, device);
    items_.follow(items, device);
    num_items_ = static_cast<uint32_t>(items.size());
    num_chunks_ = static_cast<uint32_t>(tiles);
    is_complete_ = true;
  }

  DeviceTable<Item> items_;
  DeviceTable<kernels::cuda::Chunk> chunks_;
  uint32_t num_items_ = 0;
  uint32_t num_chunks_ = 0;
  bool is_complete_ = false;  // both tables are of the same items
};

}  // namespace muster
