// The partials of norms other than the Euclidean, in the lanes of grad_stats. Compiled once: rare, and bound by
// arithmetic, not by memory.
#pragma once

#include "kernels/kernels.h"

namespace muster::kernels {

/// grad_stats of one segment.
void take_norm_partials(const StatsSegment& segment, double norm_type) noexcept;

}  // namespace muster::kernels
