#include <algorithm>

#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/stream_copy.h"
#include "kernels/kernels.h"
#include "kernels/pieces.h"

namespace muster::kernels {
namespace {

// What a pass works on at a time stays in the nearest caches: two tiles of four arrays are 128 KB in fp32.
constexpr size_t kPiece = 2 * kTile;

bool is_in_place(int num_ranks, const ReduceSegment& segment) noexcept {
  const auto* const end = segment.gradients + num_ranks;
  return std::find(segment.gradients, end, segment.sum) != end;
}

DType sum_dtype(DType gradients) noexcept { return gradients == DType::f64 ? DType::f64 : DType::f32; }

// `streams`: sums go past the caches.
void reduce_segment(DType dtype, int num_ranks, const ReduceSegment& segment, bool streams) noexcept {
  alignas(64) std::byte scratch[kPiece * sizeof(double)];
  const DType wide = sum_dtype(dtype);
  const void* sources[kMaxReduceRanks];
  const IsaTable& table = *best_table().table;
  for (size_t begin = 0; begin < segment.n; begin += kPiece) {
    const size_t n = std::min(kPiece, segment.n - begin);
    for (int r = 0; r < num_ranks; ++r) sources[r] = skip_bytes(segment.gradients[r], begin * size_of(dtype));
    void* sum = skip_bytes(segment.sum, begin * size_of(wide));
    void* destination = streams ? scratch : sum;
    double* const partials = segment.partials + begin / kTile;
    if (wide == dtype && segment.factors == nullptr) {
      table.sum_with_stats(dtype, sources, num_ranks, destination, n, partials);
    } else {
      if (wide == dtype) {
        table.sum_scaled(dtype, sources, segment.factors, num_ranks, destination, n);
      } else {
        table.sum_widened(dtype, sources, num_ranks, static_cast<float*>(destination), n);
      }
      const StatsSegment stats{destination, partials, n, wide};
      table.grad_stats(&stats, 1);
    }
    if (streams) stream_copy(sum, scratch, n * size_of(wide));
  }
}

size_t bytes_of(const StepArguments& arguments) noexcept {
  size_t bytes = 0;
  for (size_t i = 0; i < arguments.count; ++i) bytes += arguments.segments[i].n * size_of(arguments.dtype);
  return bytes;
}

template <class Group>
void step_and_copy(void (*step)(const StepArguments&, const Group*) noexcept, const StepArguments& arguments,
                   const Group* groups, const StepCopies& copies) noexcept {
  const size_t wide = size_of(arguments.dtype);
  const auto copy = copy_for(bytes_of(arguments));
  for (size_t i = 0; i < arguments.count; ++i) {
    const StepSegment& whole = arguments.segments[i];
    for (size_t begin = 0; begin < whole.n; begin += kPiece) {
      const StepSegment piece = piece_of(whole, begin, std::min(kPiece, whole.n - begin), arguments.dtype);
      StepArguments own = arguments;
      own.segments = &piece;
      own.count = 1;
      step(own, groups);
      const size_t size = whole.low != nullptr ? sizeof(uint16_t) : wide;
      auto* const stepped = static_cast<std::byte*>(whole.low != nullptr ? piece.low : piece.parameter);
      for (int d = 0; d < copies.count; ++d) copy(stepped + copies.displacements[d], stepped, piece.n * size);
    }
  }
}

}  // namespace

void reduce_stats(DType dtype, int num_ranks, const ReduceSegment* segments, size_t count, double norm_type) noexcept {
  size_t bytes = 0;
  for (size_t i = 0; i < count; ++i) bytes += segments[i].n * size_of(sum_dtype(dtype));
  for (size_t i = 0; i < count; ++i) {
    const bool streams = is_streamed(bytes) && !is_in_place(num_ranks, segments[i]);
    reduce_segment(dtype, num_ranks, segments[i], streams);
    if (norm_type == 2) continue;
    const StatsSegment stats{segments[i].sum, segments[i].partials, segments[i].n, sum_dtype(dtype)};
    grad_stats(&stats, 1, norm_type);
  }
}

void adam_step_with_copies(const StepArguments& arguments, const AdamGroup* groups, const StepCopies& copies) noexcept {
  step_and_copy(adam_step, arguments, groups, copies);
}

void sgd_step_with_copies(const StepArguments& arguments, const SgdGroup* groups, const StepCopies& copies) noexcept {
  step_and_copy(sgd_step, arguments, groups, copies);
}

void adagrad_step_with_copies(const StepArguments& arguments, const AdagradGroup* groups,
                              const StepCopies& copies) noexcept {
  step_and_copy(adagrad_step, arguments, groups, copies);
}

}  // namespace muster::kernels
