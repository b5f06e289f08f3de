// Compiled with OpenMP where torch has it: at::parallel_for is a template that runs its body alone otherwise.
#include "optimizer/parallel_kernels.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstddef>
#include <type_traits>

namespace muster {

namespace {

// A multiple of kernels::kTile. Below two of these, a second thread costs more than it saves.
constexpr size_t kPiece = size_t{64} * kernels::kTile;

template <class Segment>
bool is_worth_it(const std::vector<Segment>& segments) {
  size_t elements = 0;
  for (const auto& segment : segments) elements += segment.n;
  return at::get_num_threads() > 1 && elements >= 2 * kPiece;
}

// Neighbouring segments go to one thread: piece boundaries are where kPiece elements have come together.
template <class Segment>
std::vector<int64_t> starts_of(const std::vector<Segment>& segments) {
  std::vector<int64_t> starts{0};
  size_t elements = 0;
  for (size_t i = 0; i < segments.size(); ++i) {
    elements += segments[i].n;
    if (elements < kPiece) continue;
    starts.push_back(static_cast<int64_t>(i) + 1);
    elements = 0;
  }
  if (starts.back() != static_cast<int64_t>(segments.size())) starts.push_back(static_cast<int64_t>(segments.size()));
  return starts;
}

template <class Segment, class Call>
void for_each_piece(const std::vector<Segment>& segments, const Call& call) {
  const auto starts = starts_of(segments);
  at::parallel_for(0, static_cast<int64_t>(starts.size()) - 1, 1, [&](int64_t begin, int64_t end) {
    const auto first = starts[static_cast<size_t>(begin)];
    const auto last = starts[static_cast<size_t>(end)];
    call(segments.data() + first, static_cast<size_t>(last - first));
  });
}

// Cuts segments at multiples of kPiece; `skip(segment)` moves one's pointers past its n elements.
template <class Segment, class Skip>
std::vector<Segment> pieces_of(const std::vector<Segment>& segments, const Skip& skip) {
  std::vector<Segment> pieces;
  for (auto segment : segments) {
    for (size_t left = segment.n; left > 0;) {
      segment.n = std::min(left, kPiece);
      pieces.push_back(segment);
      left -= segment.n;
      skip(segment);
    }
  }
  return pieces;
}

template <class T>
void advance(T*& pointer, size_t bytes) {
  if (pointer == nullptr) return;
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  pointer = reinterpret_cast<T*>(reinterpret_cast<Byte*>(pointer) + bytes);
}

}  // namespace

void parallel_grad_stats(const std::vector<kernels::StatsSegment>& segments) {
  if (!is_worth_it(segments)) {
    kernels::grad_stats(segments.data(), segments.size());
    return;
  }
  const auto pieces = pieces_of(segments, [](kernels::StatsSegment& segment) {
    advance(segment.gradient, segment.n * kernels::size_of(segment.dtype));
    segment.partials += kernels::num_tiles(segment.n);
  });
  for_each_piece(pieces, [](const kernels::StatsSegment* first, size_t count) { kernels::grad_stats(first, count); });
}

void parallel_step(kernels::DType dtype, const std::vector<kernels::StepSegment>& segments,
                   void (*step)(const void* context, const kernels::StepSegment* first, size_t count),
                   const void* context) {
  if (!is_worth_it(segments)) {
    step(context, segments.data(), segments.size());
    return;
  }
  const size_t wide = kernels::size_of(dtype);
  const auto pieces = pieces_of(segments, [&](kernels::StepSegment& segment) {
    advance(segment.gradient, segment.n * wide);
    advance(segment.parameter, segment.n * wide);
    advance(segment.low, segment.n * 2);
    for (auto& state : segment.state) advance(state, segment.n * wide);
  });
  for_each_piece(pieces, [&](const kernels::StepSegment* first, size_t count) { step(context, first, count); });
}

}  // namespace muster
