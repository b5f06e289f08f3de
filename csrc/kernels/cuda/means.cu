#include "kernels/cuda/step_chunk.h"

namespace muster::kernels::cuda {
namespace {

constexpr unsigned kThreads = 256;

/// kAhead vectors, a stride apart: all are read before the first is written, to keep enough loads in flight.
template <int kN, int kAhead, class T>
MUSTER_DEVICE void mean_vectors(const MeanSegment& segment, uint64_t first, T divisor, const Clipping<T>& clipping) {
  constexpr uint32_t kStride = kThreads * kN;
  T* values = static_cast<T*>(segment.values) + first;
  Pack<T, kN> x[kAhead];
  MUSTER_UNROLL
  for (int a = 0; a < kAhead; ++a) x[a] = load<kN>(values + a * kStride);
  MUSTER_UNROLL
  for (int a = 0; a < kAhead; ++a) {
    MUSTER_UNROLL
    for (int k = 0; k < kN; ++k) x[a].v[k] = clipped(x[a].v[k] / divisor, clipping);
    store(values + a * kStride, x[a]);
    if (segment.low != nullptr) store_low(segment.low_dtype, segment.low, first + a * kStride, x[a]);
  }
}

/// One chunk by one block.
template <class T>
MUSTER_DEVICE void mean_chunk(const MeanSegment& segment, uint32_t index, T divisor, const Clipping<T>& clipping) {
  constexpr int kN = static_cast<int>(kVectorBytes / sizeof(T));
  constexpr int kAhead = 4;
  constexpr uint32_t kStride = kThreads * kN;
  const uint64_t first = uint64_t{index} * kTile;
  const uint32_t n = static_cast<uint32_t>(segment.n - first < kTile ? segment.n - first : kTile);
  const bool is_low_aligned = is_aligned<BFloat16, kN>(static_cast<const BFloat16*>(segment.low));
  const bool is_vector = is_aligned<T, kN>(static_cast<const T*>(segment.values)) &&
                         MUSTER_MUTATE(means_misaligned_store, is_low_aligned, true);
  const uint32_t whole = is_vector ? n / kN * kN : 0;
  uint32_t i = threadIdx.x * kN;
  for (; i + (kAhead - 1) * kStride < whole; i += kAhead * kStride) {
    mean_vectors<kN, kAhead>(segment, first + i, divisor, clipping);
  }
  for (; i < whole; i += kStride) mean_vectors<kN, 1>(segment, first + i, divisor, clipping);
  const uint32_t end = MUSTER_MUTATE(means_short_tail, n, n % kN == 0 ? n : n - 1);
  for (uint32_t j = whole + threadIdx.x; j < end; j += kThreads) {
    mean_vectors<1, 1>(segment, first + j, divisor, clipping);
  }
}

MUSTER_KERNEL void __launch_bounds__(kThreads, 4)
    apply_means_kernel(const MeanSegment* segments, const Chunk* chunks, uint32_t num_chunks,
                       const StepScalars* scalars, bool clips) {
  if (MUSTER_MUTATE(means_of_dropped_windows, scalars->dropped != 0, false)) return;
  const double divisor = scalars->divisor;
  const bool is_clipped = MUSTER_MUTATE(means_always_clip, clips, true);
  for (uint32_t c = blockIdx.x; c < num_chunks; c += gridDim.x) {
    const Chunk chunk = chunks[c];
    const MeanSegment segment = segments[chunk.item];
    if (segment.dtype == DType::f64) {
      mean_chunk<double>(segment, chunk.index, divisor, mean_clipping<double>(*scalars, is_clipped));
    } else {
      mean_chunk<float>(segment, chunk.index, static_cast<float>(divisor), mean_clipping<float>(*scalars, is_clipped));
    }
  }
}

}  // namespace

Status apply_means(const MeanSegment* segments, const Chunk* chunks, uint32_t num_chunks, const StepScalars* scalars,
                   bool clips, Stream stream) noexcept {
  return launch_over(num_chunks, 8, apply_means_kernel, kThreads, stream, segments, chunks, num_chunks, scalars, clips);
}

}  // namespace muster::kernels::cuda
