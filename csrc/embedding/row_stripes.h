// The division of a server's rows of a table into stripes, each of which is stepped and read by itself.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace muster {

/// Of rows of `dim` floats, of which a server has up to `rows`. The same in all processes. A value. Thread-safe.
class RowStripes {
 public:
  /// Enough for the threads of a server to find one that nobody is at; more would cost small pushes.
  static constexpr uint32_t kMost = 16;
  /// A stripe's values take at least a page of memory, which may be as large as this: small tables have fewer stripes.
  static constexpr int64_t kLeastBytes = int64_t{2} << 20;

  RowStripes(int64_t rows, int64_t dim) noexcept {
    const int64_t rows_of_least = std::max<int64_t>(kLeastBytes / (dim * static_cast<int64_t>(sizeof(float))), 1);
    const auto most = static_cast<uint64_t>(std::clamp<int64_t>(rows / rows_of_least, 1, kMost));
    bits_ = std::bit_width(most) - 1;
  }

  uint32_t count() const noexcept { return uint32_t{1} << bits_; }

  /// Below count(). By other bits than RowIndex goes by: a stripe's rows lie all over its index.
  uint32_t of(int64_t row) const noexcept {
    auto mixed = static_cast<uint64_t>(row);
    mixed = (mixed ^ (mixed >> 33)) * 0xff51afd7ed558ccdULL;
    mixed = (mixed ^ (mixed >> 33)) * 0xc4ceb9fe1a85ec53ULL;
    return static_cast<uint32_t>((mixed >> 32) & (count() - 1));
  }

 private:
  int bits_ = 0;
};

}  // namespace muster
