// What a loss adds to its replica's tail and what a window reports, shared by the CPU and the CUDA kernels: in double,
// by the rules of math.h.
#pragma once

#include "kernels/kernels.h"
#include "kernels/math.h"
#include "kernels/step_math.h"

namespace muster::kernels {

// --- one number ----------------------------------------------------------------------------------------------------

template <class T>
MUSTER_HOST_DEVICE double read_as(const void* value) noexcept {
  return static_cast<double>(*static_cast<const T*>(value));
}

template <class T>
MUSTER_HOST_DEVICE double read_low(const void* value) noexcept {
  return static_cast<double>(widen(*static_cast<const T*>(value)));
}

/// One element of any dtype.
MUSTER_HOST_DEVICE double read_number(const void* value, DType dtype) noexcept {
  switch (dtype) {
    case DType::f32:
      return read_as<float>(value);
    case DType::f64:
      return read_as<double>(value);
    case DType::bf16:
      return read_low<BFloat16>(value);
    case DType::f16:
      return read_low<Half>(value);
    case DType::i64:
      return read_as<int64_t>(value);
    case DType::i32:
      return read_as<int32_t>(value);
    case DType::i16:
      return read_as<int16_t>(value);
    case DType::i8:
      return read_as<int8_t>(value);
    default:  // u8 and boolean
      return read_as<uint8_t>(value);
  }
}

/// The float whose rounding to fewer bits is `value`'s: of the two neighbours of an inexact value the odd one (Boldo
/// and Melquiond 2008).
MUSTER_HOST_DEVICE float round_to_odd(double value) noexcept {
  const float nearest = static_cast<float>(value);
  const double back = static_cast<double>(nearest);
  if (back == value || value != value) return nearest;
  const bool is_outward = value < 0 ? back < value : back > value;
  return bits_as<float>((bits_as<uint32_t>(nearest) - (is_outward ? 1u : 0u)) | 1u);
}

/// Rounded once, to f32, f64, bf16 or f16.
MUSTER_HOST_DEVICE void write_number(void* to, DType dtype, double value) noexcept {
  if (dtype == DType::f64) {
    *static_cast<double*>(to) = value;
  } else if (dtype == DType::f32) {
    *static_cast<float*>(to) = static_cast<float>(value);
  } else if (dtype == DType::bf16) {
    *static_cast<BFloat16*>(to) = narrow<BFloat16>(round_to_odd(value));
  } else {
    *static_cast<Half*>(to) = narrow<Half>(round_to_odd(value));
  }
}

// --- a loss --------------------------------------------------------------------------------------------------------

/// 0 without a loss.
MUSTER_HOST_DEVICE double weight_of(const LossTerms& terms) noexcept {
  if (terms.loss == nullptr) return 0;
  return terms.weight == nullptr ? terms.rows : read_number(terms.weight, terms.weight_dtype);
}

MUSTER_HOST_DEVICE bool contributes(double weight) noexcept { return weight > 0 && is_finite(weight); }

MUSTER_HOST_DEVICE double nan_value() noexcept { return bits_as<double>(uint64_t{0x7ff8000000000000u}); }

/// Of note_loss, what goes to the tail's fields.
MUSTER_HOST_DEVICE void add_loss(const LossTerms& terms, double weight, double* tail) noexcept {
  if (contributes(weight)) {
    tail[kWeight] = tail[kWeight] + weight;
    tail[kWeightedLoss] =
        tail[kWeightedLoss] + (terms.is_mean ? weight : 1.0) * read_number(terms.loss, terms.loss_dtype);
    tail[kContributions] = tail[kContributions] + 1;
    const int losses = terms.is_mean ? kMeanLosses : kSumLosses;
    tail[losses] = tail[losses] + 1;
  } else if (weight != 0) {
    tail[kWeight] = nan_value();
  }
}

/// What note_loss adds to a metric's slot.
MUSTER_HOST_DEVICE double weighted_metric(const LossMetric& metric, double weight) noexcept {
  return weight * read_number(metric.value, metric.dtype);
}

/// What a gradient is multiplied by on its way into the sum.
MUSTER_HOST_DEVICE double share_of(bool is_mean, double weight, double unit) noexcept {
  if (!contributes(weight)) return 0.0;
  return is_mean ? weight / unit : 1.0;
}

MUSTER_HOST_DEVICE double seed_of(double weight, double loss_scale) noexcept {
  return contributes(weight) ? loss_scale : 0.0;
}

// --- reports -------------------------------------------------------------------------------------------------------

MUSTER_HOST_DEVICE double* metrics_of(WindowReport* report) noexcept { return reinterpret_cast<double*>(report + 1); }

/// `weight` is that of the window, 0 where dropped.
MUSTER_HOST_DEVICE double reported_metric(const double* tail, double weight, uint32_t slot) noexcept {
  const double* sums = tail + metric_field(slot);
  return weight > 0 ? sums[0] / sums[1] : nan_value();
}

MUSTER_HOST_DEVICE double reported_loss(const double* tail, double weight) noexcept {
  if (!(weight > 0)) return nan_value();
  return tail[kSumLosses] > 0 ? tail[kWeightedLoss] : tail[kWeightedLoss] / weight;
}

/// All but the metrics.
MUSTER_HOST_DEVICE void report_open(const double* tail, double loss_scale, WindowReport* report) noexcept {
  const double weight = tail[kWeight];
  report->loss = reported_loss(tail, weight);
  report->weight = weight;
  report->grad_norm = nan_value();
  report->loss_scale = loss_scale;
  report->skipped = 0;
  report->dropped = 0;
}

MUSTER_HOST_DEVICE double closed_weight(const double* tail, const StepScalars& closed) noexcept {
  return closed.dropped != 0 ? 0.0 : tail[kWeight];
}

/// All but the metrics. `loss_scale` is that of the next seeds.
MUSTER_HOST_DEVICE void report_closed(const double* tail, const StepScalars& closed, double loss_scale,
                                      WindowReport* report) noexcept {
  const double weight = closed_weight(tail, closed);
  report->loss = reported_loss(tail, weight);
  report->weight = weight;
  report->grad_norm = closed.norm;
  report->loss_scale = loss_scale;
  report->skipped = closed.dropped == 0 && closed.finite == 0 ? 1 : 0;
  report->dropped = closed.dropped != 0 ? 1 : 0;
}

}  // namespace muster::kernels
