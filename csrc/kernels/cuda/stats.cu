#include "kernels/cuda/sums.h"
#include "kernels/loss_math.h"

namespace muster::kernels::cuda {
namespace {

constexpr unsigned kThreads = 256;
constexpr unsigned kWarps = kThreads / kLanes;

template <class T>
MUSTER_DEVICE double squares_of(const void* gradient, uint64_t first, uint32_t n) {
  const T* values = static_cast<const T*>(gradient) + first;
  return tile_squares(n, [&](uint32_t i) { return values[i]; });
}

template <class T>
MUSTER_DEVICE double norm_of(const void* gradient, uint64_t first, uint32_t n, double norm_type) {
  const T* values = static_cast<const T*>(gradient) + first;
  return tile_norm(n, norm_type, [&](uint32_t i) { return static_cast<double>(values[i]); });
}

/// `partial(gradient, first, n, kind)` is the partial of one tile by one warp, valid in lane 0; `kind` is a value of
/// the tile's dtype.
template <class Partial>
MUSTER_DEVICE void all_stats(const StatsSegment* segments, const Chunk* chunks, uint32_t num_chunks,
                             const Partial& partial) {
  for (uint32_t c = blockIdx.x * kWarps + threadIdx.x / kLanes; c < num_chunks; c += gridDim.x * kWarps) {
    const Chunk chunk = chunks[c];
    const StatsSegment segment = segments[chunk.item];
    const uint64_t first = uint64_t{chunk.index} * kTile;
    const uint32_t n = static_cast<uint32_t>(segment.n - first < kTile ? segment.n - first : kTile);
    const double sum = segment.dtype == DType::f64 ? partial(segment.gradient, first, n, double{})
                                                   : partial(segment.gradient, first, n, float{});
    if (threadIdx.x % kLanes == 0) segment.partials[chunk.index] = sum;
  }
}

MUSTER_KERNEL void __launch_bounds__(kThreads, 4)
    grad_stats_kernel(const StatsSegment* segments, const Chunk* chunks, uint32_t num_chunks) {
  all_stats(segments, chunks, num_chunks, [](const void* gradient, uint64_t first, uint32_t n, auto kind) {
    return squares_of<decltype(kind)>(gradient, first, n);
  });
}

MUSTER_KERNEL void __launch_bounds__(kThreads)
    norm_stats_kernel(const StatsSegment* segments, const Chunk* chunks, uint32_t num_chunks, double norm_type) {
  all_stats(segments, chunks, num_chunks, [=](const void* gradient, uint64_t first, uint32_t n, auto kind) {
    return norm_of<decltype(kind)>(gradient, first, n, norm_type);
  });
}

/// One sum of a block's partials, which follow one another.
MUSTER_KERNEL void __launch_bounds__(kWindowThreads)
    norm_sums_kernel(const double* partials, uint64_t count, double norm_type, NormSum* sums) {
  const uint64_t of_block =
      MUSTER_MUTATE(norm_sums_drop_the_rest, (count + gridDim.x - 1) / gridDim.x, count / gridDim.x);
  const uint64_t first = blockIdx.x * of_block;
  const uint64_t left = first < count ? count - first : 0;
  const uint64_t own_count = left < of_block ? left : of_block;
  const NormSum sum = join_parts(own_partials(partials + first, own_count, norm_type), norm_type);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

struct Window {
  const double* partials;
  uint64_t num_partials;
  const NormSum* sums;
  const double* tail;
  const double* used;
  float* steps;
  uint64_t num_parameters;
  WindowOptions options;
  StepScalars* scalars;
  LossScaleState* scale;
  WindowReport* report;
  uint32_t num_slots;
};

static_assert(kNormSums <= kWindowThreads, "a thread reads one");

MUSTER_KERNEL void __launch_bounds__(kWindowThreads) finish_window_kernel(MUSTER_GRID_CONSTANT(Window) w) {
  NormSum own;
  if (w.sums == nullptr) {
    own = own_partials(w.partials, w.num_partials, w.options.norm_type);
  } else if (threadIdx.x < kNormSums) {
    own = w.sums[threadIdx.x];
  }
  const double total = total_of_parts(own, w.options.norm_type);
  const StepScalars closed = close_window(total, w.tail, w.options, w.scalars, w.scale);
  advance_window(closed, w.used, w.steps, w.num_parameters, w.options, w.scalars, w.scale);
  if (w.report == nullptr) return;
  if (threadIdx.x == 0) {
    const double loss_scale = loss_scale_of(w.scale, w.options.loss_scale);
    report_closed(w.tail, closed, MUSTER_MUTATE(report_ignores_the_scale, loss_scale, w.options.loss_scale), w.report);
  }
  const double weight = MUSTER_MUTATE(report_of_a_dropped_weight, closed_weight(w.tail, closed), w.tail[kWeight]);
  for (uint32_t slot = threadIdx.x; slot < w.num_slots; slot += kWindowThreads) {
    metrics_of(w.report)[slot] = reported_metric(w.tail, weight, slot);
  }
}

MUSTER_KERNEL void __launch_bounds__(kThreads)
    count_steps_kernel(float* steps, const double* used, uint64_t n, const StepScalars* scalars) {
  for (uint64_t p = uint64_t{blockIdx.x} * kThreads + threadIdx.x; p < n; p += uint64_t{gridDim.x} * kThreads) {
    const double* own = used == nullptr ? nullptr : used + p;
    if (MUSTER_MUTATE(count_of_skipped_steps, is_stepped(*scalars, own), own == nullptr || *own > 0)) {
      steps[p] = steps[p] + 1;
    }
  }
}

}  // namespace

Status grad_stats(const StatsSegment* segments, const Chunk* chunks, uint32_t num_chunks, double norm_type,
                  Stream stream) noexcept {
  const uint64_t blocks = (uint64_t{num_chunks} + kWarps - 1) / kWarps;
  if (norm_type != 2) {
    return launch_over(blocks, 8, norm_stats_kernel, kThreads, stream, segments, chunks, num_chunks, norm_type);
  }
  return launch_over(blocks, 8, grad_stats_kernel, kThreads, stream, segments, chunks, num_chunks);
}

Status finish_window(const double* partials, size_t num_partials, NormSum* sums, const double* tail, const double* used,
                     float* steps, size_t num_parameters, const WindowOptions& options, StepScalars* scalars,
                     LossScaleState* scale, WindowReport* report, uint32_t num_slots, Stream stream) noexcept {
  if (num_partials <= kFewPartials) sums = nullptr;
  if (sums != nullptr) {
    const Status status = launch(norm_sums_kernel, {kNormSums, kWindowThreads}, stream, partials,
                                 uint64_t{num_partials}, options.norm_type, sums);
    if (!status.ok()) return status;
  }
  const Window window{partials,       num_partials, sums,    tail,  used,   steps,
                      num_parameters, options,      scalars, scale, report, num_slots};
  return launch(finish_window_kernel, {1, kWindowThreads}, stream, window);
}

Status count_steps(float* steps, const double* used, size_t n, const StepScalars* scalars, Stream stream) noexcept {
  return launch_over((n + kThreads - 1) / kThreads, 8, count_steps_kernel, kThreads, stream, steps, used, n, scalars);
}

}  // namespace muster::kernels::cuda
