#include "kernels/kernels.h"
#include "kernels/step_math.h"

namespace muster::kernels {
namespace {

template <class T>
void apply_mean(const MeanSegment& segment, const StepScalars& scalars, bool clips) noexcept {
  const auto divisor = static_cast<T>(scalars.divisor);
  const auto clipping = mean_clipping<T>(scalars, clips);
  auto* values = static_cast<T*>(segment.values);
  for (size_t i = 0; i < segment.n; ++i) values[i] = clipped(values[i] / divisor, clipping);
  if (segment.low == nullptr) return;
  for (size_t i = 0; i < segment.n; ++i) {
    const auto value = static_cast<float>(values[i]);
    if (segment.low_dtype == DType::bf16) {
      static_cast<BFloat16*>(segment.low)[i] = narrow<BFloat16>(value);
    } else {
      static_cast<Half*>(segment.low)[i] = narrow<Half>(value);
    }
  }
}

}  // namespace

void apply_means(const MeanSegment* segments, size_t count, const StepScalars* scalars, bool clips) noexcept {
  if (scalars->dropped != 0) return;
  for (size_t k = 0; k < count; ++k) {
    if (segments[k].dtype == DType::f64) {
      apply_mean<double>(segments[k], *scalars, clips);
    } else {
      apply_mean<float>(segments[k], *scalars, clips);
    }
  }
}

}  // namespace muster::kernels
