#include "optimizer/gradient_norm.h"

#include <ATen/ops/isfinite.h>

#include <algorithm>

#include "comm/kernel_dtype.h"
#include "optimizer/parallel_kernels.h"

namespace muster {

void take_norm(const std::vector<at::Tensor>& sums, const double* tail, double clip_norm, double loss_scale,
               kernels::StepScalars& scalars) {
  std::vector<kernels::StatsSegment> segments;
  segments.reserve(sums.size());
  size_t tiles = 0;
  for (const auto& values : sums) {
    const auto n = static_cast<size_t>(values.numel());
    segments.push_back({values.const_data_ptr(), nullptr, n, kernel_dtype(values.scalar_type())});
    tiles += kernels::num_tiles(n);
  }
  std::vector<double> partials(tiles);
  double* next = partials.data();
  for (auto& segment : segments) {
    segment.partials = next;
    next += kernels::num_tiles(segment.n);
  }
  parallel_grad_stats(segments);
  kernels::WindowOptions options{};
  options.clip_norm = clip_norm;
  options.loss_scale = loss_scale;
  const double unit = scalars.unit;
  kernels::finish_window(partials.data(), partials.size(), tail, nullptr, nullptr, 0, options, &scalars, nullptr);
  scalars.unit = unit;
  // The square of an fp64 value may overflow.
  if (scalars.finite == 0 && std::all_of(sums.begin(), sums.end(), [](const at::Tensor& values) {
        return at::isfinite(values).all().item<bool>();
      })) {
    scalars.finite = 1;
  }
}

}  // namespace muster
