// Torch-free kernels over raw pointers. Arithmetic of one element is + - * / sqrt only and compiled without
// contraction, so that every instruction set gives the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace muster::kernels {

enum class DType : uint8_t { f32, f64, bf16, f16, i64, i32, i16, i8, u8, boolean };

enum class Reduction : uint8_t { sum, min, max };

size_t size_of(DType dtype) noexcept;

/// destinations[d][i] = the reduction over sources s of sources[s][i], for i in [0, n). Sums follow the tree
/// ((0+1)+(2+3))+... over source indices; a null source is absent and its sibling passes unchanged. f64 is reduced in
/// f64, integers exactly (wrapping), bf16 and f16 in f32 with one rounding (to nearest even) at the end; min and max
/// propagate NaN; boolean sum is logical or. Destinations may alias sources of the same index range. Does not throw.
void tree_reduce(DType dtype, Reduction reduction, const void* const* sources, int num_sources,
                 void* const* destinations, int num_destinations, size_t n) noexcept;

/// One gradient on its way into a bucket.
struct PackItem {
  const void* source;  ///< n elements of `source_dtype` in slot order, or null: contributes zeros
  DType source_dtype;  ///< f32, f64, bf16 or f16
  void* destination;   ///< n elements of f64 when source_dtype is f64, else of f32
  size_t n;
};

/// destination = (accumulate ? destination : 0) + float(source); a null source leaves an accumulated destination
/// unchanged and zeroes one that is overwritten.
void pack(const PackItem* items, size_t count, bool accumulate) noexcept;

/// Tiles of this many elements carry one fp64 partial each, so that a norm depends on no layout or thread.
inline constexpr size_t kTile = 4096;

inline constexpr size_t num_tiles(size_t n) noexcept { return (n + kTile - 1) / kTile; }

/// values[i] = values[i] / divisor (exact when divisor is a power of two), and partials[t] = the sum of squares of
/// tile t of the divided values in fp64, in a fixed order of additions. `dtype` is f32 or f64. A partial is not finite
/// when some value of its tile is not finite (a finite f32 square cannot overflow fp64; an f64 one may).
void divide_with_stats(DType dtype, void* values, size_t n, double divisor, double* partials) noexcept;

/// values[i] = values[i] * factor, computed in the dtype (f32 or f64).
void scale(DType dtype, void* values, size_t n, double factor) noexcept;

}  // namespace muster::kernels
