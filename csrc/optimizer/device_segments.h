// What a kernel's launch works on, in a device's memory.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/device_table.h"
#include "kernels/cuda/cuda_kernels.h"

namespace muster {

/// Segments (StatsSegment, StepSegment, MeanSegment) and the chunks of all of them. Owned by one thread; copies are
/// ordered by its current stream.
template <class Segment>
class DeviceSegments {
 public:
  /// Makes the device's tables those of `segments`.
  void follow(const std::vector<Segment>& segments, c10::Device device) {
    if (segments_.holds(segments.data(), segments.size() * sizeof(Segment))) return;
    size_t tiles = 0;
    for (const auto& segment : segments) tiles += kernels::num_tiles(segment.n);
    std::vector<kernels::cuda::Chunk> chunks(tiles);
    auto* next = chunks.data();
    for (size_t i = 0; i < segments.size(); ++i) {
      next = kernels::cuda::list_chunks(next, static_cast<uint32_t>(i), segments[i].n);
    }
    chunks_.follow(chunks, device);
    segments_.follow(segments, device);
    num_chunks_ = static_cast<uint32_t>(tiles);
  }

  const Segment* segments() const { return static_cast<const Segment*>(segments_.data()); }
  const kernels::cuda::Chunk* chunks() const { return static_cast<const kernels::cuda::Chunk*>(chunks_.data()); }
  uint32_t num_chunks() const noexcept { return num_chunks_; }

 private:
  DeviceTable segments_;
  DeviceTable chunks_;
  uint32_t num_chunks_ = 0;
};

}  // namespace muster
