#include "kernels/kernels.h"
#include "kernels/step_math.h"

namespace muster::kernels {
namespace {

double add_partials(const double* partials, size_t count) noexcept {
  double lanes[kPartialLanes] = {};
  for (size_t i = 0; i < count; ++i) lanes[i % kPartialLanes] = lanes[i % kPartialLanes] + partials[i];
  for (size_t half = kPartialLanes / 2; half > 0; half /= 2) {
    for (size_t lane = 0; lane < half; ++lane) lanes[lane] = lanes[lane] + lanes[lane + half];
  }
  return lanes[0];
}

}  // namespace

void finish_window(const double* partials, size_t num_partials, const double* tail, const double* used, float* steps,
                   size_t num_parameters, const WindowOptions& options, StepScalars* scalars,
                   LossScaleState* scale) noexcept {
  const double loss_scale = scale != nullptr ? static_cast<double>(scale->scale) : options.loss_scale;
  close_scalars(add_partials(partials, num_partials), tail, loss_scale, options, scalars);
  if (scalars->dropped != 0) return;
  const bool finite = scalars->finite != 0;
  if (finite) {
    for (size_t p = 0; p < num_parameters; ++p) {
      if (used[p] > 0) steps[p] = steps[p] + 1;
    }
  }
  if (scale != nullptr) loss_scale_update(scale, finite, options.growth, options.backoff, options.interval);
}

void loss_scale_update(LossScaleState* scale, bool finite, float growth, float backoff, int32_t interval) noexcept {
  advance_scale(scale, finite, growth, backoff, interval);
}

}  // namespace muster::kernels
