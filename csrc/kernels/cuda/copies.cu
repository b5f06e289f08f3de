#include "kernels/cuda/device.h"

namespace muster::kernels::cuda {
namespace {

constexpr unsigned kCopyThreads = 256;

/// Bytes of one unit; those behind its segment's end are 0.
struct alignas(kCopyUnit) Unit {
  uint64_t words[2];
};

/// Units of a segment, from one on.
struct Units {
  uint64_t first;  // byte in the segment
  uint32_t count;
  uint32_t last_bytes;  // of the last one

  MUSTER_MEMBER uint32_t bytes_of(uint32_t unit) const { return unit + 1 < count ? kCopyUnit : last_bytes; }
};

MUSTER_DEVICE Units units_of(const CopySegment& segment, uint32_t chunk) {
  const uint64_t first = uint64_t{chunk} * kTile;
  const uint64_t rest = segment.n - first;
  Units units;
  units.count = static_cast<uint32_t>(rest < kTile ? rest : kTile);
  units.first = first * kCopyUnit;
  const uint64_t behind = segment.bytes - units.first - uint64_t{units.count - 1} * kCopyUnit;
  units.last_bytes = static_cast<uint32_t>(behind < kCopyUnit ? behind : kCopyUnit);
  return units;
}

MUSTER_DEVICE bool is_on_unit(const void* p) { return reinterpret_cast<uintptr_t>(p) % kCopyUnit == 0; }

MUSTER_DEVICE Unit load_unit(const unsigned char* from, uint32_t bytes) {
  if (bytes == kCopyUnit && is_on_unit(from)) {
    check_access(from, alignof(Unit));
    return *reinterpret_cast<const Unit*>(from);
  }
  Unit unit{};
  const uint32_t end = MUSTER_MUTATE(digest_short_tail, bytes, bytes - bytes % 4);
  for (uint32_t b = 0; b < end; ++b) unit.words[b / 8] |= uint64_t{from[b]} << (b % 8 * 8);
  return unit;
}

MUSTER_DEVICE void copy_unit(unsigned char* to, const unsigned char* from, uint32_t bytes) {
  if (bytes == kCopyUnit && is_on_unit(to) && is_on_unit(from)) {
    check_access(to, alignof(Unit));
    *reinterpret_cast<Unit*>(to) = *reinterpret_cast<const Unit*>(from);
    return;
  }
  for (uint32_t b = 0; b < bytes; ++b) to[b] = from[b];
}

/// Every word changes the state one to one. Multiplication carries bits upwards alone, so the upper ones are put upon
/// the lower ones: else two signs that change in one lane could leave the state as it was.
MUSTER_DEVICE uint64_t absorb(uint64_t state, uint64_t word) {
  state = (state ^ word) * 0x9E3779B97F4A7C15u;
  return state ^ (state >> 32);
}

/// The finaliser of splitmix64 (Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom Number Generators").
MUSTER_DEVICE uint64_t finish(uint64_t state) {
  state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
  state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
  return state ^ (state >> 31);
}

MUSTER_KERNEL void digest_copies_kernel(const CopySegment* segments, const Chunk* chunks, uint32_t num_chunks) {
  MUSTER_SHARED uint64_t of_threads[kCopyThreads];
  for (uint32_t c = blockIdx.x; c < num_chunks; c += gridDim.x) {
    const CopySegment& segment = segments[chunks[c].item];
    const Units units = units_of(segment, chunks[c].index);
    const auto* bytes = static_cast<const unsigned char*>(segment.values) + units.first;
    uint64_t state = threadIdx.x + 1;
    for (uint32_t u = threadIdx.x; u < units.count; u += kCopyThreads) {
      const Unit unit = load_unit(bytes + uint64_t{u} * kCopyUnit, units.bytes_of(u));
      state = absorb(absorb(state, unit.words[0]), unit.words[1]);
    }
    of_threads[threadIdx.x] = finish(state);
    __syncthreads();
    for (unsigned width = kCopyThreads / 2; width > 0; width /= 2) {
      if (threadIdx.x < width) of_threads[threadIdx.x] += of_threads[threadIdx.x + width];
      __syncthreads();
    }
    if (threadIdx.x == 0) segment.digests[chunks[c].index] = of_threads[0];
  }
}

MUSTER_KERNEL void mend_copies_kernel(const CopySegment* segments, const Chunk* chunks, uint32_t num_chunks) {
  for (uint32_t c = blockIdx.x; c < num_chunks; c += gridDim.x) {
    const CopySegment& segment = segments[chunks[c].item];
    const uint32_t index = chunks[c].index;
    if (MUSTER_MUTATE(mend_always, segment.digests[index] == segment.source_digests[index], false)) continue;
    const Units units = units_of(segment, index);
    auto* to = static_cast<unsigned char*>(segment.values) + units.first;
    const auto* from = static_cast<const unsigned char*>(segment.source) + units.first;
    for (uint32_t u = threadIdx.x; u < units.count; u += kCopyThreads) {
      copy_unit(to + uint64_t{u} * kCopyUnit, from + uint64_t{u} * kCopyUnit, units.bytes_of(u));
    }
  }
}

}  // namespace

Status digest_copies(const CopySegment* segments, const Chunk* chunks, uint32_t num_chunks, Stream stream) noexcept {
  return launch_waves(num_chunks, 2, digest_copies_kernel, kCopyThreads, stream, segments, chunks, num_chunks);
}

Status mend_copies(const CopySegment* segments, const Chunk* chunks, uint32_t num_chunks, Stream stream) noexcept {
  return launch_waves(num_chunks, 2, mend_copies_kernel, kCopyThreads, stream, segments, chunks, num_chunks);
}

}  // namespace muster::kernels::cuda
