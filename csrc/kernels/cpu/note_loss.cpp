#include "kernels/kernels.h"
#include "kernels/loss_math.h"

namespace muster::kernels {

void note_loss(const LossTerms& terms, const StepScalars* scalars, const LossScaleState* scale, double* tail,
               double* gate, void* seed, WindowReport* report) noexcept {
  const double weight = weight_of(terms);
  const double loss_scale = loss_scale_of(scale, 1);
  for (uint32_t i = 0; terms.first && i < tail_size(terms.num_slots); ++i) tail[i] = 0;
  add_loss(terms, weight, tail);
  for (uint32_t m = 0; contributes(weight) && m < terms.num_metrics; ++m) {
    double* sums = tail + metric_field(terms.metrics[m].slot);
    sums[0] = sums[0] + weighted_metric(terms.metrics[m], weight);
    sums[1] = sums[1] + weight;
  }
  *gate = share_of(terms.is_mean, weight, scalars->unit);
  if (seed != nullptr) {
    write_number(seed, terms.loss_dtype, seed_of(weight, loss_scale));
  }
  if (report == nullptr) return;
  report_open(tail, loss_scale, report);
  for (uint32_t slot = 0; slot < terms.num_slots; ++slot) {
    metrics_of(report)[slot] = reported_metric(tail, tail[kWeight], slot);
  }
}

}  // namespace muster::kernels
