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

/// What a value adds to the partial of its tile: its square for a `norm_type` of 2, its magnitude for the maximum norm,
/// else the magnitude's power.
MUSTER_HOST_DEVICE double norm_term(double value, double norm_type) noexcept {
  if (norm_type == 2) return value * value;
  const double magnitude = value < 0 ? -value : value;
  return norm_type == 1 || !is_finite(norm_type) ? magnitude : positive_power(magnitude, norm_type);
}

/// Two partials as one: their sum, or the larger for the maximum norm. NaN stays NaN.
MUSTER_HOST_DEVICE double join_partials(double a, double b, double norm_type) noexcept {
  if (is_finite(norm_type)) return a + b;
  return a > b || a != a ? a : b;
}

/// The norm from all partials as one.
MUSTER_HOST_DEVICE double norm_root(double sum, double norm_type) noexcept {
  if (norm_type == 2) return square_root(sum);
  return norm_type == 1 || !is_finite(norm_type) ? sum : positive_power(sum, 1 / norm_type);
}

/// What a norm is multiplied by to stay below `clip_norm`, as in torch.nn.utils.clip_grad_norm_; 0: no bound.
MUSTER_HOST_DEVICE double norm_clip(double norm, double clip_norm) noexcept {
  const double clip = clip_norm / (norm + 1e-6);
  return clip_norm > 0 && clip < 1 ? clip : 1;
}

/// A unit near the mean weight that is a power of two of the last one: sums do not depend on how far it has moved, so
/// that a job which was interrupted goes on with the same bits. The last one where no double is near.
MUSTER_HOST_DEVICE double next_unit(double unit, double mean_weight) noexcept {
  const double next = unit * nearest_power_of_two(mean_weight / unit);
  return next > 0 && is_finite(next) ? next : unit;
}

/// Whether gradients in fp32 keep their digits when they are multiplied by weights that add up to `divisor`. Weights
/// far from the unit do not until that has moved.
MUSTER_HOST_DEVICE bool keeps_digits(double divisor) noexcept { return divisor > 0x1p-100 && divisor < 0x1p100; }

/// `scalars` of finish_window from all partials as one, see norm_root. `loss_scale` is that of the window's seeds.
MUSTER_HOST_DEVICE void close_scalars(double sum, const double* tail, double loss_scale, const WindowOptions& options,
                                      StepScalars* scalars) noexcept {
  const double weight = tail[kWeight];
  const bool dropped = !(weight > 0) || tail[kFailures] > 0;
  const bool is_plain = dropped || tail[kSumLosses] > 0;
  const double divisor = is_plain ? loss_scale : weight / scalars->unit * loss_scale;
  const double norm = norm_root(sum, options.norm_type) / divisor;
  scalars->divisor = divisor;
  scalars->clip = norm_clip(norm, options.clip_norm);
  scalars->clip_value = options.clip_value;
  scalars->norm = norm;
  scalars->finite = is_finite(sum) && keeps_digits(divisor) ? 1 : 0;
  scalars->dropped = dropped ? 1 : 0;
  if (!dropped) scalars->unit = next_unit(scalars->unit, weight / tail[kContributions]);
}

/// What a step begins with where a parameter of low precision has `wide` as its master copy: a copy that does not round
/// to the parameter is older than it, and the parameter counts.
template <class Low, class T>
MUSTER_HOST_DEVICE T current_master(T wide, Low low) noexcept {
  const bool is_current = narrow<Low>(static_cast<float>(wide)).bits == low.bits;
  return is_current ? wide : static_cast<T>(widen(low));
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

template <class T>
MUSTER_HOST_DEVICE Clipping<T> clipping_of(const StepScalars& scalars) noexcept {
  const double none = bits_as<double>(uint64_t{0x7ff} << 52);
  return {static_cast<T>(scalars.clip), static_cast<T>(scalars.clip_value > 0 ? scalars.clip_value : none)};
}

/// What apply_means clips by.
template <class T>
MUSTER_HOST_DEVICE Clipping<T> mean_clipping(const StepScalars& scalars, bool clips) noexcept {
  StepScalars none{};
  none.clip = 1;
  return clipping_of<T>(clips && scalars.finite != 0 ? scalars : none);
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

/// What a step clips by; to maximize it also turns the gradient round.
template <class T>
MUSTER_HOST_DEVICE Clipping<T> step_clipping(const StepScalars& scalars, bool maximize) noexcept {
  Clipping<T> clipping = clipping_of<T>(scalars);
  if (maximize) clipping.factor = -clipping.factor;
  return clipping;
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
