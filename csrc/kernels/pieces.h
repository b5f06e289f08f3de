// Parts of segments, on the host.
#pragma once

#include <cstddef>
#include <type_traits>

#include "kernels/kernels.h"

namespace muster::kernels {

/// `pointer` moved on by so many bytes; null stays null.
template <class T>
T* skip_bytes(T* pointer, size_t bytes) noexcept {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  return pointer == nullptr ? nullptr : reinterpret_cast<T*>(reinterpret_cast<Byte*>(pointer) + bytes);
}

/// Elements [begin, begin + n) of a segment whose elements are of `dtype`; `begin` is a multiple of kTile.
inline StepSegment piece_of(const StepSegment& segment, size_t begin, size_t n, DType dtype) noexcept {
  const size_t wide = begin * size_of(dtype);
  StepSegment piece = segment;
  piece.n = n;
  piece.gradient = skip_bytes(segment.gradient, wide);
  piece.parameter = skip_bytes(segment.parameter, wide);
  piece.low = skip_bytes(segment.low, begin * sizeof(uint16_t));
  for (auto& state : piece.state) state = skip_bytes(state, wide);
  return piece;
}

inline StatsSegment piece_of(const StatsSegment& segment, size_t begin, size_t n) noexcept {
  return {skip_bytes(segment.gradient, begin * size_of(segment.dtype)), segment.partials + begin / kTile, n,
          segment.dtype};
}

}  // namespace muster::kernels
