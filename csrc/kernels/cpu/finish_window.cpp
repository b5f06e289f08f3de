#include "kernels/kernels.h"
#include "kernels/loss_math.h"
#include "kernels/step_math.h"

namespace muster::kernels {
namespace {

double add_partials(const double* partials, size_t count, double norm_type) noexcept {
  double lanes[kPartialLanes] = {};
  for (size_t i = 0; i < count; ++i) {
    double& lane = lanes[i % kPartialLanes];
    lane = join_partials(lane, partials[i], norm_type);
  }
  for (size_t half = kPartialLanes / 2; half > 0; half /= 2) {
    for (size_t lane = 0; lane < half; ++lane) {
      lanes[lane] = join_partials(lanes[lane], lanes[lane + half], norm_type);
    }
  }
  return lanes[0];
}

void count_window(const StepScalars& closed, const double* used, float* steps, size_t num_parameters,
                  const WindowOptions& options, LossScaleState* scale) noexcept {
  if (closed.dropped != 0) return;
  count_steps(steps, used, num_parameters, &closed);
  if (scale != nullptr) loss_scale_update(scale, closed.finite != 0, options.growth, options.backoff, options.interval);
}

}  // namespace

void finish_window(const double* partials, size_t num_partials, const double* tail, const double* used, float* steps,
                   size_t num_parameters, const WindowOptions& options, StepScalars* scalars, LossScaleState* scale,
                   WindowReport* report, uint32_t num_slots) noexcept {
  close_scalars(add_partials(partials, num_partials, options.norm_type), tail, loss_scale_of(scale, options.loss_scale),
                options, scalars);
  count_window(*scalars, used, steps, num_parameters, options, scale);
  if (report == nullptr) return;
  report_closed(tail, *scalars, loss_scale_of(scale, options.loss_scale), report);
  const double weight = report->weight;
  for (uint32_t slot = 0; slot < num_slots; ++slot) metrics_of(report)[slot] = reported_metric(tail, weight, slot);
}

void count_steps(float* steps, const double* used, size_t n, const StepScalars* scalars) noexcept {
  for (size_t p = 0; p < n; ++p) {
    if (is_stepped(*scalars, used == nullptr ? nullptr : used + p)) steps[p] = steps[p] + 1;
  }
}

void loss_scale_update(LossScaleState* scale, bool finite, double growth, double backoff, int32_t interval) noexcept {
  advance_scale(scale, finite, growth, backoff, interval);
}

}  // namespace muster::kernels
