#include "kernels/cpu/norm_partials.h"

#include <algorithm>

#include "kernels/step_math.h"

namespace muster::kernels {
namespace {

template <class T>
double tile_partial(const T* values, size_t n, double norm_type) noexcept {
  double lanes[kLanes] = {};
  for (size_t i = 0; i < n; ++i) {
    double& lane = lanes[i % kLanes];
    lane = join_partials(lane, norm_term(static_cast<double>(values[i]), norm_type), norm_type);
  }
  for (size_t half = kLanes / 2; half > 0; half /= 2) {
    for (size_t lane = 0; lane < half; ++lane) {
      lanes[lane] = join_partials(lanes[lane], lanes[lane + half], norm_type);
    }
  }
  return lanes[0];
}

template <class T>
void all_partials(const StatsSegment& segment, double norm_type) noexcept {
  const auto* const values = static_cast<const T*>(segment.gradient);
  for (size_t begin = 0; begin < segment.n; begin += kTile) {
    segment.partials[begin / kTile] = tile_partial(values + begin, std::min(kTile, segment.n - begin), norm_type);
  }
}

}  // namespace

void take_norm_partials(const StatsSegment& segment, double norm_type) noexcept {
  (segment.dtype == DType::f64 ? all_partials<double> : all_partials<float>)(segment, norm_type);
}

}  // namespace muster::kernels
