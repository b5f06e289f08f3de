// Kernels spread over torch's intra-op threads, where there are several and the work is large. Results do not depend on
// their number.
#pragma once

#include <vector>

#include "kernels/kernels.h"

namespace muster {

/// As kernels::grad_stats.
void parallel_grad_stats(const std::vector<kernels::StatsSegment>& segments, double norm_type);

/// Steps neighbouring segments.
using SegmentsStep = void (*)(const void* context, const kernels::StepSegment* first, size_t count);

/// Calls `step(first, count)` on pieces of `segments`, whose elements are of `dtype`; each piece is a StepSegment.
void parallel_step(kernels::DType dtype, const std::vector<kernels::StepSegment>& segments, SegmentsStep step,
                   const void* context);

/// The same of segments that are not cut.
void parallel_row_step(const std::vector<kernels::StepSegment>& segments, SegmentsStep step, const void* context);

}  // namespace muster
