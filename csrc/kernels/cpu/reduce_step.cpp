#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>

#include "kernels/kernels.h"

namespace muster::kernels {
namespace {

// What a pass works on at a time stays in the nearest caches: two tiles of four arrays are 128 KB in fp32.
constexpr size_t kPiece = 2 * kTile;

template <class T>
T* skip(T* pointer, size_t bytes) noexcept {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  return pointer == nullptr ? nullptr : reinterpret_cast<T*>(reinterpret_cast<Byte*>(pointer) + bytes);
}

void reduce_segment(DType dtype, int num_ranks, const ReduceSegment& segment) noexcept {
  const size_t size = size_of(dtype);
  const void* sources[kMaxReduceRanks];
  for (size_t begin = 0; begin < segment.n; begin += kPiece) {
    const size_t n = std::min(kPiece, segment.n - begin);
    for (int r = 0; r < num_ranks; ++r) sources[r] = skip(segment.gradients[r], begin * size);
    void* sum = skip(segment.sum, begin * size);
    tree_reduce(dtype, Reduction::sum, sources, num_ranks, &sum, 1, n);
    const StatsSegment stats{sum, segment.partials + begin / kTile, n, dtype};
    grad_stats(&stats, 1);
  }
}

template <class Group>
using Step = void (*)(const StepArguments& arguments, const Group* groups);

template <class Group>
void step_and_copy(Step<Group> step, const StepArguments& arguments, const Group* groups,
                   const StepCopies* copies) noexcept {
  const size_t wide = size_of(arguments.dtype);
  for (size_t i = 0; i < arguments.count; ++i) {
    const StepSegment& whole = arguments.segments[i];
    for (size_t begin = 0; begin < whole.n; begin += kPiece) {
      StepSegment piece = whole;
      piece.n = std::min(kPiece, whole.n - begin);
      piece.gradient = skip(whole.gradient, begin * wide);
      piece.parameter = skip(whole.parameter, begin * wide);
      piece.low = skip(whole.low, begin * sizeof(uint16_t));
      for (auto& state : piece.state) state = skip(state, begin * wide);
      StepArguments own = arguments;
      own.segments = &piece;
      own.count = 1;
      step(own, groups);
      const size_t size = whole.low != nullptr ? sizeof(uint16_t) : wide;
      const void* const stepped = whole.low != nullptr ? piece.low : piece.parameter;
      for (int d = 0; d < copies[i].count; ++d) {
        std::memcpy(skip(copies[i].destinations[d], begin * size), stepped, piece.n * size);
      }
    }
  }
}

}  // namespace

void reduce_stats(DType dtype, int num_ranks, const ReduceSegment* segments, size_t count) noexcept {
  for (size_t i = 0; i < count; ++i) reduce_segment(dtype, num_ranks, segments[i]);
}

void adam_step(const StepArguments& arguments, const AdamGroup* groups, const StepCopies* copies) noexcept {
  step_and_copy<AdamGroup>(adam_step, arguments, groups, copies);
}

void sgd_step(const StepArguments& arguments, const SgdGroup* groups, const StepCopies* copies) noexcept {
  step_and_copy<SgdGroup>(sgd_step, arguments, groups, copies);
}

void adagrad_step(const StepArguments& arguments, const AdagradGroup* groups, const StepCopies* copies) noexcept {
  step_and_copy<AdagradGroup>(adagrad_step, arguments, groups, copies);
}

}  // namespace muster::kernels
