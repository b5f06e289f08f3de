// Compiled with OpenMP where torch has it: at::parallel_for is a template that runs its body alone otherwise.
#include "optimizer/parallel_kernels.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstddef>

#include "kernels/pieces.h"

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

// Cuts segments at multiples of kPiece; `piece(segment, begin, n)` is a part of one.
template <class Segment, class Piece>
std::vector<Segment> pieces_of(const std::vector<Segment>& segments, const Piece& piece) {
  std::vector<Segment> pieces;
  for (const auto& segment : segments) {
    for (size_t begin = 0; begin < segment.n; begin += kPiece) {
      pieces.push_back(piece(segment, begin, std::min(kPiece, segment.n - begin)));
    }
  }
  return pieces;
}

}  // namespace

void parallel_grad_stats(const std::vector<kernels::StatsSegment>& segments, double norm_type) {
  if (!is_worth_it(segments)) {
    kernels::grad_stats(segments.data(), segments.size(), norm_type);
    return;
  }
  const auto pieces = pieces_of(segments, [](const kernels::StatsSegment& segment, size_t begin, size_t n) {
    return kernels::piece_of(segment, begin, n);
  });
  for_each_piece(
      pieces, [=](const kernels::StatsSegment* first, size_t count) { kernels::grad_stats(first, count, norm_type); });
}

void parallel_step(kernels::DType dtype, const std::vector<kernels::StepSegment>& segments, SegmentsStep step,
                   const void* context) {
  if (!is_worth_it(segments)) {
    step(context, segments.data(), segments.size());
    return;
  }
  const auto pieces = pieces_of(segments, [&](const kernels::StepSegment& segment, size_t begin, size_t n) {
    return kernels::piece_of(segment, begin, n, dtype);
  });
  for_each_piece(pieces, [&](const kernels::StepSegment* first, size_t count) { step(context, first, count); });
}

void parallel_row_step(const std::vector<kernels::StepSegment>& segments, SegmentsStep step, const void* context) {
  if (!is_worth_it(segments)) return step(context, segments.data(), segments.size());
  for_each_piece(segments, [&](const kernels::StepSegment* first, size_t count) { step(context, first, count); });
}

}  // namespace muster
