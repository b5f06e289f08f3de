// The partials of norms other than the Euclidean, in the lanes of grad_stats. Compiled once: rare, and bound by
// arithmetic, not by memory.
#pragma once

#include "kernels/kernels.h"
#include "kernels/step_math.h"

namespace muster::kernels {

/// Joins value(0) to value(count - 1), partials of a norm, into one: value i to lane i % kLaneCount in ascending order,
/// lanes then folded in halves.
template <size_t kLaneCount, class Value>
double join_in_lanes(size_t count, double norm_type, const Value& value) noexcept {
  double lanes[kLaneCount] = {};
  for (size_t i = 0; i < count; ++i) {
    double& lane = lanes[i % kLaneCount];
    lane = join_partials(lane, value(i), norm_type);
  }
  for (size_t half = kLaneCount / 2; half > 0; half /= 2) {
    for (size_t lane = 0; lane < half; ++lane) {
      lanes[lane] = join_partials(lanes[lane], lanes[lane + half], norm_type);
    }
  }
  return lanes[0];
}

/// grad_stats of one segment.
void take_norm_partials(const StatsSegment& segment, double norm_type) noexcept;

}  // namespace muster::kernels
