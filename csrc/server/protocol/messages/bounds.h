// Bounds of counts in messages; those of a plan are in plan.h.
#pragma once

#include <cstddef>

namespace muster::server {

inline constexpr size_t kMaxNumbers = size_t{1} << 22;
inline constexpr size_t kMaxText = size_t{64} << 10;
inline constexpr size_t kMaxRecord = size_t{1} << 20;

}  // namespace muster::server
