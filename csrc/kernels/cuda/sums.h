// Norms in the order of kernels.h, for grad_stats, finish_window and reduce_step.
#pragma once

#include "kernels/cuda/device.h"
#include "kernels/norm_sum.h"
#include "kernels/step_math.h"

namespace muster::kernels::cuda {

inline constexpr unsigned kWindowThreads = 256;  // of the block that closes a window

/// Lane 0 receives its warp's partials as one, folded in halves.
MUSTER_DEVICE double fold_warp(double value, double norm_type) {
  MUSTER_UNROLL
  for (unsigned half = kLanes / 2; half > 0; half /= 2) {
    const double other = __shfl_down_sync(0xffffffffu, value, half);
    value = MUSTER_MUTATE(fold_misses_a_half, true, half != 4) ? join_partials(value, other, norm_type) : value;
  }
  return value;
}

/// The sum of squares of one tile's `n` values by one warp, valid in lane 0. `value(i)` reads element i, each once.
template <class Value>
MUSTER_DEVICE double tile_squares(uint32_t n, const Value& value) {
  constexpr uint32_t kAhead = 8;  // loads in flight
  double sum = 0;
  uint32_t i = threadIdx.x % kLanes;
  for (; i + (kAhead - 1) * kLanes < n; i += kAhead * kLanes) {
    decltype(value(i)) ahead[kAhead];
    MUSTER_UNROLL
    for (uint32_t a = 0; a < kAhead; ++a) ahead[a] = value(i + a * static_cast<uint32_t>(kLanes));
    MUSTER_UNROLL
    for (uint32_t a = 0; a < kAhead; ++a) {
      const double wide = ahead[a];
      sum = sum + wide * wide;
    }
  }
  const uint32_t end = MUSTER_MUTATE(stats_short_tail, n, n < kTile && n > 0 ? n - 1 : n);
  for (; i < end; i += kLanes) {
    const double wide = value(i);
    sum = sum + wide * wide;
  }
  return fold_warp(sum, 2);
}

/// tile_squares of another norm.
template <class Value>
MUSTER_DEVICE double tile_norm(uint32_t n, double norm_type, const Value& value) {
  double sum = 0;
  for (uint32_t i = threadIdx.x % kLanes; i < n; i += kLanes) {
    sum = join_partials(sum, MUSTER_MUTATE(norm_of_squares, norm_term(value(i), norm_type), value(i) * value(i)),
                        norm_type);
  }
  return fold_warp(sum, norm_type);
}

/// A thread's part of the partials, by a block of kWindowThreads.
MUSTER_DEVICE NormSum own_partials(const double* partials, uint64_t count, double norm_type) {
  constexpr uint64_t kAhead = 8;  // loads in flight: an addition depends on the one before
  NormSum own;
  uint64_t i = threadIdx.x;
  for (; i + (kAhead - 1) * kWindowThreads < count; i += kAhead * kWindowThreads) {
    double ahead[kAhead];
    MUSTER_UNROLL
    for (uint64_t a = 0; a < kAhead; ++a) ahead[a] = partials[i + a * kWindowThreads];
    MUSTER_UNROLL
    for (uint64_t a = 0; a < kAhead; ++a) add_partial(own, ahead[a], norm_type);
  }
  for (; i < count; i += kWindowThreads) add_partial(own, partials[i], norm_type);
  return own;
}

/// The parts of all threads of a block of kWindowThreads as one, valid in thread 0. A barrier must come before the next
/// call.
MUSTER_DEVICE NormSum join_parts(NormSum own, double norm_type) {
  MUSTER_SHARED uint64_t digits[kWindowThreads][NormSum::kDigits];
  MUSTER_SHARED int32_t tops[kWindowThreads];
  MUSTER_SHARED double specials[kWindowThreads];
  const unsigned lane = threadIdx.x;
  const auto share = [&] {
    for (int i = 0; i < NormSum::kDigits; ++i) digits[lane][i] = own.digits[i];
    tops[lane] = own.top;
    specials[lane] = own.special;
  };
  share();
  __syncthreads();
  for (unsigned half = kWindowThreads / 2; half > 0; half /= 2) {
    if (lane < half) {
      NormSum other;
      for (int i = 0; i < NormSum::kDigits; ++i) other.digits[i] = digits[lane + half][i];
      other.top = tops[lane + half];
      other.special = specials[lane + half];
      join_norm_sums(own, other, norm_type);
      share();
    }
    MUSTER_MUTATE(sum_drops_a_syncthreads, __syncthreads(), void());
  }
  return own;
}

/// The parts of all threads of a block of kWindowThreads as one; valid in every thread. A barrier must come before the
/// next call.
MUSTER_DEVICE double total_of_parts(const NormSum& own, double norm_type) {
  const NormSum sum = join_parts(own, norm_type);
  MUSTER_SHARED double total;
  if (threadIdx.x == 0) total = norm_total(sum);
  __syncthreads();
  return total;
}

/// All partials as one, by a block of kWindowThreads; valid in every thread. A barrier must come before the next call.
MUSTER_DEVICE double add_partials(const double* partials, uint64_t count, double norm_type) {
  return total_of_parts(own_partials(partials, count, norm_type), norm_type);
}

// --- the end of a window -------------------------------------------------------------------------------------------

/// What finish_window finds from all partials as one, in every thread of a block of kWindowThreads. Changes nothing.
MUSTER_DEVICE StepScalars close_window(double total, const double* tail, const WindowOptions& options,
                                       const StepScalars* scalars, const LossScaleState* scale) {
  StepScalars closed;
  closed.unit = scalars->unit;
  const double loss_scale = loss_scale_of(scale, options.loss_scale);
  close_scalars(total, tail, loss_scale, options, &closed);
  return closed;
}

/// What finish_window changes, by one block. `closed` is from close_window.
MUSTER_DEVICE void advance_window(const StepScalars& closed, const double* used, float* steps, uint64_t num_parameters,
                                  const WindowOptions& options, StepScalars* scalars, LossScaleState* scale) {
  if (threadIdx.x == 0) {
    *scalars = closed;
    if (scale != nullptr && closed.dropped == 0) {
      advance_scale(scale, closed.finite != 0, options.growth, options.backoff, options.interval);
    }
  }
  if (closed.dropped != 0 || closed.finite == 0) return;
  for (uint64_t p = threadIdx.x; p < num_parameters; p += blockDim.x) {
    if (used[p] > 0) steps[p] = steps[p] + 1;
  }
}

}  // namespace muster::kernels::cuda
