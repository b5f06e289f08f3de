#include "kernels/cuda/device.h"
#include "kernels/loss_math.h"

namespace muster::kernels::cuda {
namespace {

constexpr unsigned kThreads = 128;

struct Note {
  LossTerms terms;
  const StepScalars* scalars;
  const LossScaleState* scale;
  double* tail;
  double* gate;
  void* seed;
  WindowReport* report;
};

MUSTER_KERNEL void __launch_bounds__(kThreads) note_loss_kernel(MUSTER_GRID_CONSTANT(Note) a) {
  const LossTerms& terms = a.terms;
  const double weight = weight_of(terms);
  const double loss_scale = loss_scale_of(a.scale, 1);
  const bool is_added = MUSTER_MUTATE(note_loss_multiplies, contributes(weight), is_finite(weight));
  if (MUSTER_MUTATE(note_loss_always_first, terms.first, true)) {
    for (uint32_t i = threadIdx.x; i < tail_size(terms.num_slots); i += kThreads) a.tail[i] = 0;
  }
  MUSTER_MUTATE(note_loss_zeroes_late, __syncthreads(), void());
  if (threadIdx.x == 0) {
    add_loss(terms, weight, a.tail);
    *a.gate = share_of(terms.is_mean, weight, a.scalars->unit);
    if (a.seed != nullptr) {
      write_number(a.seed, terms.loss_dtype, seed_of(weight, loss_scale));
    }
  }
  for (uint32_t m = threadIdx.x; is_added && m < terms.num_metrics; m += kThreads) {
    double* sums = a.tail + metric_field(terms.metrics[m].slot);
    sums[0] = sums[0] + weighted_metric(terms.metrics[m], weight);
    sums[1] = sums[1] + MUSTER_MUTATE(metric_counts_losses, weight, 1.0);
  }
  if (a.report == nullptr) return;
  MUSTER_MUTATE(note_loss_reports_early, __syncthreads(), void());
  if (threadIdx.x == 0) report_open(a.tail, loss_scale, a.report);
  for (uint32_t slot = threadIdx.x; slot < terms.num_slots; slot += kThreads) {
    metrics_of(a.report)[slot] = reported_metric(a.tail, a.tail[kWeight], slot);
  }
}

bool is_floating(DType dtype) noexcept {
  return dtype == DType::f32 || dtype == DType::f64 || dtype == DType::bf16 || dtype == DType::f16;
}

bool has_its_slots(const LossTerms& terms) noexcept {
  if (terms.num_metrics > kMaxMetrics) return false;
  for (uint32_t m = 0; m < terms.num_metrics; ++m) {
    if (terms.metrics[m].slot >= terms.num_slots) return false;
  }
  return true;
}

}  // namespace

Status note_loss(const LossTerms& terms, const StepScalars* scalars, const LossScaleState* scale, double* tail,
                 double* gate, void* seed, WindowReport* report, Stream stream) noexcept {
  if (terms.loss != nullptr && !is_floating(terms.loss_dtype)) {
    return {Status::Code::invalid, "a loss is f32, f64, bf16 or f16"};
  }
  if (!has_its_slots(terms)) return {Status::Code::invalid, "a loss has at most 64 metrics, each with a slot"};
  return launch(note_loss_kernel, {1, kThreads}, stream, Note{terms, scalars, scale, tail, gate, seed, report});
}

}  // namespace muster::kernels::cuda
