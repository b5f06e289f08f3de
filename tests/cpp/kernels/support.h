// What the kernels' tests share.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "kernels/cpu/dispatch.h"
#include "kernels/cpu/stream_copy.h"
#include "kernels/kernels.h"

namespace muster::kernels::testing {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
/// Around the widths of vectors, pieces and tiles.
inline constexpr size_t kSizes[] = {0, 1, 15, 31, 33, 1023, 1025, 4095, 4096, 4097, 10007};
/// More than passes through a cache.
inline constexpr size_t kStreamedSize = kStreamedBytes / sizeof(float) + 1237;

template <class T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, float>) return DType::f32;
  if constexpr (std::is_same_v<T, double>) return DType::f64;
  if constexpr (std::is_same_v<T, c10::BFloat16>) return DType::bf16;
  if constexpr (std::is_same_v<T, c10::Half>) return DType::f16;
  if constexpr (std::is_same_v<T, int64_t>) return DType::i64;
  if constexpr (std::is_same_v<T, int32_t>) return DType::i32;
  if constexpr (std::is_same_v<T, int16_t>) return DType::i16;
  if constexpr (std::is_same_v<T, int8_t>) return DType::i8;
  if constexpr (std::is_same_v<T, uint8_t>) return DType::u8;
  return DType::boolean;
}

template <class T>
using Wide = std::conditional_t<std::is_same_v<T, c10::BFloat16> || std::is_same_v<T, c10::Half>, float, T>;

template <class T>
T draw(std::mt19937_64& random) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(random());
  } else {
    const auto value = static_cast<float>(static_cast<double>(static_cast<int64_t>(random())) / 1e18);
    return static_cast<T>(random() % 50 == 0 ? value * 1e-6F : value);
  }
}

inline std::vector<NamedTable> tables() {
  size_t count = 0;
  const NamedTable* first = usable_tables(count);
  return {first, first + count};
}

template <class T>
bool same_bits(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

/// Equal bits; NaN equals NaN, whose sign and payload are the machine's.
template <class T>
bool same_values(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!same_bits(a[i], b[i]) && !(a[i] != a[i] && b[i] != b[i])) return false;
  }
  return true;
}

/// Now and then a value that is no ordinary number.
template <class T>
T draw_special(std::mt19937_64& random) {
  const T special[] = {std::numeric_limits<T>::infinity(),
                       -std::numeric_limits<T>::infinity(),
                       std::numeric_limits<T>::quiet_NaN(),
                       std::numeric_limits<T>::denorm_min(),
                       std::numeric_limits<T>::min() / T(3),
                       T(0),
                       -T(0),
                       std::numeric_limits<T>::max()};
  return random() % 20 == 0 ? special[random() % 8] : draw<T>(random);
}

}  // namespace muster::kernels::testing
