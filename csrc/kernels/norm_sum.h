// The partials of a norm as one number whose bits depend on no order, shared by the CPU and the CUDA kernels.
#pragma once

#include <cstdint>

#include "kernels/math.h"
#include "kernels/step_math.h"

namespace muster::kernels {

/// The sum of partials that are not negative, held without rounding: whoever adds whichever of them, in whatever order,
/// the total has the same bits. The number line is cut into bins of 32 bits, bin 0 from 2^-1074 up, so that a double
/// lies in at most three; a sum has the four bins up to that of its greatest partial, and what is below them never
/// counts. As the binned sums of Demmel and Nguyen, "Parallel Reproducible Summation" (IEEE Trans. Comput. 64, 2015),
/// with integers. For the maximum norm it is the largest partial. A value; at most 2^31 partials.
struct NormSum {
  static constexpr int kDigits = 4;
  static constexpr int kLowest = 1;  ///< the bin of the least partials

  uint64_t digits[kDigits] = {};  ///< digit i in units of bin top - 3 + i; carries stay where they are
  int32_t top = kLowest;
  double special = 0;  ///< the largest partial of the maximum norm; else infinity or NaN where a partial was

  bool operator==(const NormSum&) const = default;
};

/// A finite double as mantissa * 2^(exponent - 1074).
struct ScaledInteger {
  uint64_t mantissa;
  int32_t exponent;
};

MUSTER_HOST_DEVICE ScaledInteger scaled_integer(double value) noexcept {
  const auto bits = bits_as<uint64_t>(value);
  const auto field = static_cast<int32_t>(bits >> 52 & 0x7ff);
  const uint64_t fraction = bits & ((uint64_t{1} << 52) - 1);
  return field == 0 ? ScaledInteger{fraction, 0} : ScaledInteger{fraction | uint64_t{1} << 52, field - 1};
}

/// The bin of a partial: that of bit 52 of its mantissa, set or not.
MUSTER_HOST_DEVICE int32_t norm_bin(double partial) noexcept { return (scaled_integer(partial).exponent + 52) / 32; }

MUSTER_HOST_DEVICE double join_specials(double a, double b, double norm_type) noexcept {
  if (!is_finite(norm_type)) return join_partials(a, b, norm_type);
  return a != a || b != b ? bits_as<double>(uint64_t{0x7ff8} << 48) : a + b;  // one NaN, whoever finds it
}

/// Adds to the digits of a sum whose top is at least norm_bin(partial); `partial` is finite.
MUSTER_HOST_DEVICE void add_digits(uint64_t* digits, int32_t top, double partial) noexcept {
  const ScaledInteger whole = scaled_integer(partial);
  const int32_t shift = whole.exponent % 32;
  const int32_t lowest = whole.exponent / 32 - (top - (NormSum::kDigits - 1));
  const uint64_t above = whole.mantissa >> (32 - shift);
  const uint64_t parts[3] = {(whole.mantissa << shift) & 0xffffffffu, above & 0xffffffffu, above >> 32};
  for (int32_t i = 0; i < NormSum::kDigits; ++i) {  // digits stay in registers: no index depends on the partial
    const int32_t part = i - lowest;
    digits[i] += part == 0 ? parts[0] : part == 1 ? parts[1] : part == 2 ? parts[2] : 0;
  }
}

/// Lifts a sum to a higher bin.
MUSTER_HOST_DEVICE void raise_top(NormSum& sum, int32_t top) noexcept {
  for (; sum.top < top; ++sum.top) {
    for (int32_t i = 0; i + 1 < NormSum::kDigits; ++i) sum.digits[i] = sum.digits[i + 1];
    sum.digits[NormSum::kDigits - 1] = 0;
  }
}

MUSTER_HOST_DEVICE void add_partial(NormSum& sum, double partial, double norm_type) noexcept {
  if (!is_finite(norm_type) || !is_finite(partial)) {
    sum.special = join_specials(sum.special, partial, norm_type);
    return;
  }
  raise_top(sum, norm_bin(partial));
  add_digits(sum.digits, sum.top, partial);
}

/// Adds a sum of other partials of the same norm.
MUSTER_HOST_DEVICE void join_norm_sums(NormSum& sum, const NormSum& other, double norm_type) noexcept {
  sum.special = join_specials(sum.special, other.special, norm_type);
  NormSum raised = other;
  raise_top(sum, other.top);
  raise_top(raised, sum.top);
  for (int32_t i = 0; i < NormSum::kDigits; ++i) sum.digits[i] += raised.digits[i];
}

/// All partials as one, rounded to nearest even; infinity where that overflows.
MUSTER_HOST_DEVICE double norm_total(const NormSum& sum) noexcept {
  if (sum.special != 0) return sum.special;
  constexpr int32_t kBins = NormSum::kDigits + 2;
  uint32_t bins[kBins + 2] = {};  // two empty ones, then from bin top - 3 on
  uint64_t carry = 0;
  for (int32_t i = 0; i < kBins; ++i) {
    const uint64_t value = (i < NormSum::kDigits ? sum.digits[i] : 0) + carry;
    bins[i + 2] = static_cast<uint32_t>(value);
    carry = value >> 32;
  }
  int32_t high = kBins + 1;
  while (high >= 2 && bins[high] == 0) --high;
  if (high < 2) return 0;
  int32_t zeros = 0;
  while ((bins[high] << zeros >> 31) == 0) ++zeros;
  const uint64_t tail = uint64_t{bins[high - 2]} << zeros;
  const uint64_t mantissa =
      ((uint64_t{bins[high]} << 32 | bins[high - 1]) << zeros) | tail >> 32;  // its highest bit is set
  bool has_rest = (tail & 0xffffffffu) != 0;
  for (int32_t i = 0; i < high - 2; ++i) has_rest = has_rest || bins[i] != 0;
  const int32_t position = 32 * (sum.top - NormSum::kDigits - 1 + high) + 31 - zeros;  // of that bit, over 2^-1074
  if (position <= 52) return bits_as<double>(mantissa >> (63 - position));
  if (position > 2097) return bits_as<double>(uint64_t{0x7ff} << 52);
  const uint64_t kept = mantissa >> 11;
  const uint64_t cut = mantissa & 0x7ff;
  const bool rounds_up = cut > 0x400 || (cut == 0x400 && (has_rest || (kept & 1) != 0));
  return bits_as<double>((static_cast<uint64_t>(position - 52) << 52) + kept + (rounds_up ? 1 : 0));
}

}  // namespace muster::kernels
