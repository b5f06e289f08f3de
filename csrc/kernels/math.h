// Arithmetic of one element, shared by the CPU and the CUDA kernels. Only + - * / sqrt, each correctly rounded on both
// sides when compiled without contraction (-ffp-contract=off, -fmad=false), so that every instruction set, CUDA and the
// emulation give the same bits. Functions are static and always inlined: a shared one could carry instructions that a
// machine lacks.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define MUSTER_HOST_DEVICE static __host__ __device__ __forceinline__
#else
#define MUSTER_HOST_DEVICE static inline __attribute__((always_inline))
#endif

namespace muster::kernels {

template <class To, class From>
MUSTER_HOST_DEVICE To bits_as(From from) noexcept {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// --- element types -------------------------------------------------------------------------------------------------

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

MUSTER_HOST_DEVICE float widen(float value) noexcept { return value; }
MUSTER_HOST_DEVICE double widen(double value) noexcept { return value; }
MUSTER_HOST_DEVICE float widen(BFloat16 value) noexcept {
  return bits_as<float>(static_cast<uint32_t>(value.bits) << 16);
}

// Normal halves move their exponent, subnormal ones are the distance from 2^-14 that their bits are above it: no
// operand is subnormal, which a processor may take for 0. Infinities and NaN are mended after it.
MUSTER_HOST_DEVICE float widen(Half value) noexcept {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude + 0x38800000u) - bits_as<float>(0x38800000u));
  const uint32_t finite = magnitude < 0x00800000u ? subnormal : magnitude + 0x38000000u;
  const uint32_t special = magnitude | 0x7f800000u;
  return bits_as<float>(sign | (magnitude >= 0x0f800000u ? special : finite));
}

// narrow(value, T{}) is overloaded on the element type; callers say narrow<T>(value).
MUSTER_HOST_DEVICE float narrow(float value, float) noexcept { return value; }
MUSTER_HOST_DEVICE double narrow(double value, double) noexcept { return value; }

MUSTER_HOST_DEVICE BFloat16 narrow(float value, BFloat16) noexcept {
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
}

// Three cases by magnitude, each computed for every value and selected: normal halves round in the integer domain,
// subnormal ones by adding 0.5f, which puts the rounding position at the last bit of the sum.
MUSTER_HOST_DEVICE Half narrow(float value, Half) noexcept {
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  return {static_cast<uint16_t>(sign | (magnitude >= 0x477ff000u ? special : finite))};
}

/// Rounds to nearest even; NaN stays NaN.
template <class T, class From>
MUSTER_HOST_DEVICE T narrow(From value) noexcept {
  return narrow(value, T{});
}

MUSTER_HOST_DEVICE float square_root(float value) noexcept { return sqrtf(value); }
MUSTER_HOST_DEVICE double square_root(double value) noexcept { return sqrt(value); }

// --- scalars -------------------------------------------------------------------------------------------------------

/// base^n by squaring, in an order of multiplications that depends on n alone.
MUSTER_HOST_DEVICE double integer_power(double base, uint64_t n) noexcept {
  double result = 1;
  while (n != 0) {
    if ((n & 1) != 0) result = result * base;
    base = base * base;
    n >>= 1;
  }
  return result;
}

/// value * 2^exponent, for |exponent| <= 2000.
MUSTER_HOST_DEVICE double times_power_of_two(double value, int exponent) noexcept {
  for (; exponent > 1000; exponent -= 1000) value = value * bits_as<double>(uint64_t{1023 + 1000} << 52);
  for (; exponent < -1000; exponent += 1000) value = value * bits_as<double>(uint64_t{1023 - 1000} << 52);
  return value * bits_as<double>(static_cast<uint64_t>(1023 + exponent) << 52);
}

/// The natural logarithm of a positive finite `x`: with x = m * 2^e and s = (m - 1) / (m + 1), e * ln 2 + 2 artanh s,
/// by artanh's series.
MUSTER_HOST_DEVICE double logarithm(double x) noexcept {
  int exponent = 0;
  if (x < 2.2250738585072014e-308) {
    x = x * 18014398509481984.0;  // 2^54: subnormals become normal
    exponent = -54;
  }
  const uint64_t bits = bits_as<uint64_t>(x);
  exponent += static_cast<int>(bits >> 52) - 1023;
  double m = bits_as<double>((bits & 0xfffffffffffffull) | 0x3ff0000000000000ull);
  if (m > 1.4142135623730951) {
    m = m / 2;
    exponent += 1;
  }
  const double s = (m - 1) / (m + 1);
  double series = 0;
  for (int k = 23; k >= 1; k -= 2) series = series * s * s + 1.0 / k;
  return exponent * 0.69314718055994531 + 2 * s * series;
}

/// e^y, by Taylor's series of what is left of y beside multiples of ln 2; infinity and 0 where it is out of range.
MUSTER_HOST_DEVICE double exponential(double y) noexcept {
  if (y > 710) return bits_as<double>(0x7ff0000000000000ull);
  if (y < -750) return 0;
  const double scaled = y * 1.4426950408889634;
  const int exponent = static_cast<int>(scaled < 0 ? scaled - 0.5 : scaled + 0.5);
  // ln 2 in two parts, of which multiples of the first are exact.
  const double rest = (y - exponent * 0.69314718036912382) - exponent * 1.9082149292705877e-10;
  double series = 1;
  for (int k = 15; k >= 1; --k) series = series * rest / k + 1;
  return times_power_of_two(series, exponent);
}

/// x^p for x >= 0 and p > 0, to a relative error of some 1e-13; x itself where it is not finite.
MUSTER_HOST_DEVICE double positive_power(double x, double p) noexcept {
  if (x == 0 || x - x != 0) return x;
  return exponential(p * logarithm(x));
}

/// The power of two nearest to a positive normal `value` (on a logarithmic scale).
MUSTER_HOST_DEVICE double nearest_power_of_two(double value) noexcept {
  const uint64_t bits = bits_as<uint64_t>(value);
  const uint64_t sqrt2_mantissa = 0x6a09e667f3bcdull;
  const uint64_t up = (bits & 0xfffffffffffffull) >= sqrt2_mantissa ? 1 : 0;
  return bits_as<double>(((bits >> 52) + up) << 52);
}

// --- one element of an optimizer step --------------------------------------------------------------------------------
// T is float or double. `g` is the mean gradient, clipped. Formulas are those of torch.optim's documentation.

/// What clips the elements of a mean gradient on their way into a step.
template <class T>
struct Clipping {
  T factor;  ///< by the norm; negative to maximize
  T bound;   ///< by value: of the magnitude; infinity: none
};

/// NaN stays NaN.
template <class T>
MUSTER_HOST_DEVICE T clipped(T mean, const Clipping<T>& clipping) noexcept {
  T g = mean * clipping.factor;
  g = clipping.bound < g ? clipping.bound : g;
  return g < -clipping.bound ? -clipping.bound : g;
}

/// g + p * weight_decay; without the term where weight_decay is 0, since 0 * inf is not 0. The choice is the same for
/// all elements of a parameter.
template <class T>
MUSTER_HOST_DEVICE T decayed(T g, T p, T weight_decay) noexcept {
  return weight_decay != 0 ? g + p * weight_decay : g;
}

/// What is equal for all elements of one parameter in one step.
template <class T>
struct AdamFactors {
  T lerp1;  ///< 1 - beta1
  T beta2;
  T complement2;   ///< 1 - beta2
  T step_size;     ///< lr / (1 - beta1^t)
  T inverse_root;  ///< 1 / sqrt(1 - beta2^t)
  T eps;
  T weight_decay;  ///< of the parameter; decoupled: 1 - lr * weight_decay, which multiplies it
};

/// Adam (Kingma and Ba 2015), decoupled: AdamW (Loshchilov and Hutter 2019), kAmsgrad: Reddi et al. 2018.
template <bool kDecoupled, bool kAmsgrad, class T>
MUSTER_HOST_DEVICE void adam_element(T& p, T& m, T& v, T& v_max, T g, const AdamFactors<T>& f) noexcept {
  if (kDecoupled) {
    p = p * f.weight_decay;
  } else {
    g = decayed(g, p, f.weight_decay);
  }
  m = m + (g - m) * f.lerp1;
  v = v * f.beta2 + (g * g) * f.complement2;
  T second = v;
  if (kAmsgrad) {
    v_max = v_max < v ? v : v_max;
    second = v_max;
  }
  p = p - f.step_size * (m / (square_root(second) * f.inverse_root + f.eps));
}

template <class T>
struct SgdFactors {
  T lr;
  T momentum;
  T undamped;  ///< 1 - dampening; 1 in a parameter's first step, whose buffer starts as its gradient
  T weight_decay;
};

template <bool kMomentum, bool kNesterov, class T>
MUSTER_HOST_DEVICE void sgd_element(T& p, T& buffer, T g, const SgdFactors<T>& f) noexcept {
  g = decayed(g, p, f.weight_decay);
  if (kMomentum) {
    buffer = buffer * f.momentum + g * f.undamped;
    g = kNesterov ? g + buffer * f.momentum : buffer;
  }
  p = p - g * f.lr;
}

template <class T>
struct AdagradFactors {
  T rate;  ///< lr / (1 + (t - 1) * lr_decay)
  T eps;
  T weight_decay;
};

template <class T>
MUSTER_HOST_DEVICE void adagrad_element(T& p, T& sum, T g, const AdagradFactors<T>& f) noexcept {
  g = decayed(g, p, f.weight_decay);
  sum = sum + g * g;
  p = p - f.rate * (g / (square_root(sum) + f.eps));
}

/// `rate`: lr / (sqrt(the row's sum) + eps).
template <class T>
MUSTER_HOST_DEVICE void rowwise_adagrad_element(T& p, T g, T rate) noexcept {
  p = p - rate * g;
}

}  // namespace muster::kernels
