#include "embedding/row_initialiser.h"

#include <ATen/core/PhiloxRNGEngine.h>

#include "kernels/math.h"

namespace muster {

namespace {

// Of a positive normal value: 2 atanh((m - 1) / (m + 1)) for the mantissa m in [sqrt(1/2), sqrt(2)).
double logarithm(double value) noexcept {
  const auto bits = kernels::bits_as<uint64_t>(value);
  constexpr uint64_t kMantissa = 0xfffffffffffffULL;
  constexpr uint64_t kSqrt2Mantissa = 0x6a09e667f3bcdULL;
  const bool is_large = (bits & kMantissa) >= kSqrt2Mantissa;
  const auto mantissa = kernels::bits_as<double>((bits & kMantissa) | (is_large ? 0x3feULL << 52 : 0x3ffULL << 52));
  const auto exponent = static_cast<double>(static_cast<int64_t>(bits >> 52) - 1023 + (is_large ? 1 : 0));
  const double s = (mantissa - 1) / (mantissa + 1);
  const double square = s * s;
  double series = 0;
  for (int k = 19; k > 0; k -= 2) series = series * square + 1.0 / k;
  return exponent * 0.69314718055994530942 + 2 * s * series;
}

// A probability of at least 2^-33 and at most 1 - 2^-33: sqrt(-log) stays below 5, where PPND7 would go on otherwise.
double normal_quantile(double probability) noexcept {
  const double q = probability - 0.5;
  if (q <= 0.425 && q >= -0.425) {
    const double r = 0.180625 - q * q;
    return q * (((5.9109374720e1 * r + 1.5929113202e2) * r + 5.0434271938e1) * r + 3.3871327179) /
           (((6.7187563600e1 * r + 7.8757757664e1) * r + 1.7895169469e1) * r + 1);
  }
  const double r = kernels::square_root(-logarithm(q < 0 ? probability : 1 - probability)) - 1.6;
  const double tail = (((1.7023821103e-1 * r + 1.3067284816) * r + 2.7568153900) * r + 1.4234372777) /
                      ((1.2021132975e-1 * r + 7.3700164250e-1) * r + 1);
  return q < 0 ? -tail : tail;
}

}  // namespace

void RowInitialiser::fill(int64_t row, std::span<float> values) const noexcept {
  at::Philox4_32 random(seed, static_cast<uint64_t>(row));
  for (float& value : values) {
    const double probability = (random() + 0.5) * 0x1p-32;
    value = static_cast<float>(scale * (kind == Kind::normal ? normal_quantile(probability) : 2 * probability - 1));
  }
}

void RowInitialiser::fill_rows(const at::Tensor& values, int64_t first) const {
  const auto width = static_cast<size_t>(values.size(1));
  float* next = values.mutable_data_ptr<float>();
  for (int64_t row = 0; row < values.size(0); ++row, next += width) fill(first + row, {next, width});
}

}  // namespace muster
