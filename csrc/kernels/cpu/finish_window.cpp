#include "kernels/kernels.h"

#include "kernels/loss_math.h"
#include "kernels/norm_sum.h"
#include "kernels/step_math.h"

namespace muster::kernels {
namespace {

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
  NormSum sum;
  for (size_t i = 0; i < num_partials; ++i) add_partial(sum, partials[i], options.norm_type);
  close_scalars(norm_total(sum), tail, loss_scale_of(scale, options.loss_scale), options, scalars);
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
