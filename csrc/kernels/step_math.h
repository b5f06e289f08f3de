// What a step computes once per window or once per parameter, shared by the CPU and the CUDA kernels: in double, by the
// rules of math.h, and rounded once to the accumulation dtype T, float or double.
#pragma once

#include "kernels/kernels.h"
#include "kernels/math.h"

namespace muster::kernels {

MUSTER_HOST_DEVICE bool is_finite(double value) noexcept { return value - value == 0; }
MUSTER_HOST_DEVICE bool is_finite(float value) noexcept { return value - value == 0; }

// --- the end of a window -------------------------------------------------------------------------------------------

/// That of the window's seeds, or of the next one's once finish_window has updated `scale`.
MUSTER_HOST_DEVICE double loss_scale_of(const LossScaleState* scale, double otherwise) noexcept {
  return scale != nullptr ? static_cast<double>(scale->scale) : otherwise;
}

/// A unit near the mean weight that is a power of two of the last one: sums do not depend on how far it has moved, so
/// that a job which was interrupted goes on with the same bits.
MUSTER_HOST_DEVICE double next_unit(double unit, double mean_weight) noexcept {
  return unit * nearest_power_of_two(mean_weight / unit);
}

/// `scalars` of finish_window from the sum of squares. `loss_scale` is that of the window's seeds.
MUSTER_HOST_DEVICE void close_scalars(double sum, const double* tail, double loss_scale, const WindowOptions& options,
                                      StepScalars* scalars) noexcept {
  const double weight = tail[kWeight];
  const bool dropped = !(weight > 0) || tail[kFailures] > 0;
  const bool is_plain = dropped || tail[kSumLosses] > 0;
  const double divisor = is_plain ? loss_scale : weight / scalars->unit * loss_scale;
  const double norm = square_root(sum) / divisor;
  const double clip = options.clip_norm / (norm + 1e-6);
  scalars->divisor = divisor;
  scalars->clip = options.clip_norm > 0 && clip < 1 ? clip : 1;
  scalars->norm = norm;
  scalars->finite = is_finite(sum) ? 1 : 0;
  scalars->dropped = dropped ? 1 : 0;
  if (!dropped) scalars->unit = next_unit(scalars->unit, weight / tail[kContributions]);
}

/// See loss_scale_update.
MUSTER_HOST_DEVICE void advance_scale(LossScaleState* scale, bool finite, double growth, double backoff,
                                      int32_t interval) noexcept {
  if (!finite) {
    scale->scale = static_cast<float>(scale->scale * backoff);
    scale->growth_tracker = 0;
  } else if (scale->growth_tracker + 1 == interval) {
    const auto grown = static_cast<float>(scale->scale * growth);
    if (is_finite(grown)) scale->scale = grown;
    scale->growth_tracker = 0;
  } else {
    scale->growth_tracker = scale->growth_tracker + 1;
  }
}

/// What apply_means multiplies means by.
MUSTER_HOST_DEVICE double mean_clip(const StepScalars& scalars, bool clips) noexcept {
  return clips && scalars.finite != 0 ? scalars.clip : 1.0;
}

// --- one parameter -------------------------------------------------------------------------------------------------

/// Whether a step changes this parameter and its state. `used` as in StepSegment.
MUSTER_HOST_DEVICE bool is_stepped(const StepScalars& scalars, const double* used) noexcept {
  return scalars.finite != 0 && scalars.dropped == 0 && (used == nullptr || *used > 0);
}

/// The count of this step, from 1; a null pointer is a parameter's first.
MUSTER_HOST_DEVICE uint64_t step_count(const float* step) noexcept {
  return step == nullptr ? 1 : static_cast<uint64_t>(*step);
}

/// What a mean gradient is multiplied by on its way into a step: clips it, and turns it round to maximize.
template <class T>
MUSTER_HOST_DEVICE T clip_factor(const StepScalars& scalars, bool maximize) noexcept {
  return static_cast<T>(maximize ? -scalars.clip : scalars.clip);
}

template <class T>
MUSTER_HOST_DEVICE AdamFactors<T> adam_factors(const AdamGroup& group, uint64_t step) noexcept {
  AdamFactors<T> f;
  f.lerp1 = static_cast<T>(1 - group.beta1);
  f.beta2 = static_cast<T>(group.beta2);
  f.complement2 = static_cast<T>(1 - group.beta2);
  f.step_size = static_cast<T>(group.lr / (1 - integer_power(group.beta1, step)));
  f.inverse_root = static_cast<T>(1 / square_root(1 - integer_power(group.beta2, step)));
  f.eps = static_cast<T>(group.eps);
  f.weight_decay = static_cast<T>(group.decoupled ? 1 - group.lr * group.weight_decay : group.weight_decay);
  return f;
}

template <class T>
MUSTER_HOST_DEVICE SgdFactors<T> sgd_factors(const SgdGroup& group, uint64_t step) noexcept {
  SgdFactors<T> f;
  f.lr = static_cast<T>(group.lr);
  f.momentum = static_cast<T>(group.momentum);
  f.undamped = static_cast<T>(step == 1 ? 1.0 : 1 - group.dampening);
  f.weight_decay = static_cast<T>(group.weight_decay);
  return f;
}

template <class T>
MUSTER_HOST_DEVICE AdagradFactors<T> adagrad_factors(const AdagradGroup& group, uint64_t step) noexcept {
  AdagradFactors<T> f;
  f.rate = static_cast<T>(group.lr / (1 + (static_cast<double>(step) - 1) * group.lr_decay));
  f.eps = static_cast<T>(group.eps);
  f.weight_decay = static_cast<T>(group.weight_decay);
  return f;
}

/// Adds a row's mean square to its accumulator; what rowwise_adagrad_element takes.
template <class T>
MUSTER_HOST_DEVICE T rowwise_adagrad_rate(T& sum, double mean_square, const RowwiseAdagradGroup& group,
                                          uint64_t step) noexcept {
  sum = sum + static_cast<T>(mean_square);
  const double rate = group.lr / (1 + (static_cast<double>(step) - 1) * group.lr_decay);
  return static_cast<T>(rate / (square_root(static_cast<double>(sum)) + group.eps));
}

}  // namespace muster::kernels
