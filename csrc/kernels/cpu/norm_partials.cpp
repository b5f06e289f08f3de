#include "kernels/cpu/norm_partials.h"

#include <algorithm>

namespace muster::kernels {
namespace {

template <class T>
double tile_partial(const T* values, size_t n, double norm_type) noexcept {
  return join_in_lanes<kLanes>(n, norm_type,
                               [=](size_t i) { return norm_term(static_cast<double>(values[i]), norm_type); });
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
