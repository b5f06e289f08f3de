// Bounds of counts in messages; those of a plan are in plan.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace muster::server {

inline constexpr size_t kMaxNumbers = size_t{1} << 22;
inline constexpr size_t kMaxText = size_t{64} << 10;
inline constexpr size_t kMaxRecord = size_t{1} << 20;
inline constexpr size_t kMaxToken = 256;
inline constexpr size_t kMaxCuts = 1024;
/// Of a kernels::NormSum: the bin of the greatest double, and a digit of as many partials as one may have.
inline constexpr int32_t kMaxNormTop = 65;
inline constexpr uint64_t kMaxNormDigit = uint64_t{1} << 63;
/// Of steps: sums of two of them fit into their type.
inline constexpr uint64_t kMaxStep = uint64_t{1} << 62;

}  // namespace muster::server
