// What the tests of the CUDA kernels share: every test compiles a .cu for the host against support/cuda_emulation.h and
// compares it, bit for bit, with the CPU functions of kernels.h.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>
#include <random>
#include <vector>

#include "cpp/catch.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/math.h"
#include "support/cuda_emulation.h"

namespace muster::kernels::cuda {

/// Emulates under this seed until it dies.
class Schedule {
 public:
  explicit Schedule(uint32_t seed) : before_(emulation::options) { emulation::options.seed = seed; }
  ~Schedule() { emulation::options = before_; }
  Schedule(const Schedule&) = delete;
  Schedule& operator=(const Schedule&) = delete;

 private:
  emulation::Options before_;
};

#if defined(__SANITIZE_THREAD__)  // ten times slower
inline const std::vector<uint32_t> kSeeds = {7};
inline constexpr size_t kSmallSizes = 20;
#else
inline const std::vector<uint32_t> kSeeds = {0, 7};
inline constexpr size_t kSmallSizes = 110;
#endif

/// `n` elements that start `offset` elements after a 64-byte boundary, between two guards.
template <class T>
class Buffer {
 public:
  explicit Buffer(size_t n, size_t offset = 0) : bytes_((n + offset) * sizeof(T) + 192, kGuard), n_(n) {
    const auto address = reinterpret_cast<uintptr_t>(bytes_.data());
    const size_t shift = 64 - address % 64;
    data_ = reinterpret_cast<T*>(bytes_.data() + shift) + offset;
    memset(data_, 0, n * sizeof(T));
  }
  Buffer(const Buffer& other) : Buffer(other.n_) { memcpy(data_, other.data_, n_ * sizeof(T)); }
  Buffer(Buffer&&) noexcept = default;
  Buffer& operator=(const Buffer&) = delete;

  T* data() { return data_; }
  const T* data() const { return data_; }
  size_t size() const { return n_; }
  T& operator[](size_t i) { return data_[i]; }
  const T& operator[](size_t i) const { return data_[i]; }
  T* begin() { return data_; }
  T* end() { return data_ + n_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + n_; }

  /// Nobody wrote outside.
  bool is_intact() const {
    const auto* first = reinterpret_cast<const unsigned char*>(data_);
    const auto* last = reinterpret_cast<const unsigned char*>(data_ + n_);
    for (const unsigned char* p = bytes_.data(); p < first; ++p) {
      if (*p != kGuard) return false;
    }
    for (const unsigned char* p = last; p < bytes_.data() + bytes_.size(); ++p) {
      if (*p != kGuard) return false;
    }
    return true;
  }

 private:
  static constexpr unsigned char kGuard = 0xa5;
  std::vector<unsigned char> bytes_;
  size_t n_;
  T* data_ = nullptr;
};

/// `low` from its start on: `master` rounded, but for every third element, which somebody has written.
template <class Low, class T>
void write_thirds(const Buffer<T>& master, Low* low) {
  for (size_t i = 0; i < master.size(); ++i) {
    const auto value = static_cast<float>(master[i]);
    low[i] = narrow<Low>(i % 3 == 1 ? value / 3 : value);
  }
}

// --- equality --------------------------------------------------------------------------------------------------------

/// The same bits, or both NaN.
template <class T>
bool is_same(T a, T b) {
  if (memcmp(&a, &b, sizeof(T)) == 0) return true;
  if constexpr (std::is_integral_v<T>) {
    return false;
  } else {
    return std::isnan(widen(a)) && std::isnan(widen(b));
  }
}

/// Of one element of a floating dtype.
inline bool is_same(DType dtype, const void* a, const void* b) {
  const auto is_same_of = [&](auto like) {
    decltype(like) values[2];
    memcpy(&values[0], a, sizeof(like));
    memcpy(&values[1], b, sizeof(like));
    return is_same(values[0], values[1]);
  };
  if (dtype == DType::f64) return is_same_of(0.0);
  if (dtype == DType::f32) return is_same_of(0.0F);
  return dtype == DType::bf16 ? is_same_of(BFloat16{}) : is_same_of(Half{});
}

/// The first index where they differ, or -1.
template <class A, class B>
long first_difference(const A& a, const B& b) {
  if (a.size() != b.size()) return 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!is_same(a[i], b[i])) return static_cast<long>(i);
  }
  return -1;
}

// --- values ----------------------------------------------------------------------------------------------------------

/// Normal numbers of many magnitudes, and, when asked for, a few specials: zeros, subnormals, infinities, NaN.
class Values {
 public:
  explicit Values(uint32_t seed, bool has_specials = false) : random_(seed), has_specials_(has_specials) {}

  double next() {
    if (has_specials_ && random_() % 61 == 0) {
      const double specials[] = {0.0,     -0.0,   1e-40,    -3e-42,   INFINITY, -INFINITY, NAN,
                                 1e-45,   6e-8,   -5.97e-8, 3.4e38,   -3.4e38,  65504,     65519.99,
                                 65520.0, 1e-300, 4e-320,   1.17e-38, 3.39e38};
      return specials[random_() % (sizeof(specials) / sizeof(specials[0]))];
    }
    return normal_(random_) * std::ldexp(1.0, static_cast<int>(random_() % 13) - 6);
  }

  template <class T>
  void fill(T* values, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      if constexpr (sizeof(T) == sizeof(double)) {
        values[i] = next();
      } else {
        values[i] = narrow<T>(static_cast<float>(next()));
      }
    }
  }

  template <class T>
  void fill(Buffer<T>& buffer) {
    fill(buffer.data(), buffer.size());
  }

 private:
  std::mt19937 random_;
  std::normal_distribution<double> normal_;
  bool has_specials_;
};

/// Sizes at the edges of vectors, tiles and blocks, then many small ones.
inline std::vector<size_t> odd_sizes(size_t small = kSmallSizes) {
  std::vector<size_t> sizes = {0, 1, 3, 4, 31, 33, 4095, 4096, 4097, 0, 8191, 1030};
  for (size_t i = 0; i < small; ++i) sizes.push_back(i * 7 % 38);
  return sizes;
}

inline std::vector<Chunk> chunks_of(const std::vector<size_t>& sizes) {
  size_t count = 0;
  for (const size_t n : sizes) count += num_tiles(n);
  std::vector<Chunk> chunks(count);
  Chunk* end = chunks.data();
  for (uint32_t i = 0; i < sizes.size(); ++i) end = list_chunks(end, i, sizes[i]);
  return chunks;
}

/// A window's report, to be written and compared.
class Report {
 public:
  explicit Report(uint32_t num_slots) : bytes_(report_bytes(num_slots)), num_slots_(num_slots) {
    memset(bytes_.data(), 0x5a, bytes_.size());
  }

  WindowReport* get() { return reinterpret_cast<WindowReport*>(bytes_.data()); }

  void compare(Report& other) {
    WindowReport &a = *get(), &b = *other.get();
    CHECK(is_same(a.loss, b.loss));
    CHECK(is_same(a.weight, b.weight));
    CHECK(is_same(a.grad_norm, b.grad_norm));
    CHECK(is_same(a.loss_scale, b.loss_scale));
    CHECK(a.skipped == b.skipped);
    CHECK(a.dropped == b.dropped);
    for (uint32_t slot = 0; slot < num_slots_; ++slot) {
      CHECK(is_same(DType::f64, bytes_.data() + report_bytes(slot), other.bytes_.data() + report_bytes(slot)));
    }
    CHECK((bytes_.is_intact() && other.bytes_.is_intact()));
  }

 private:
  Buffer<unsigned char> bytes_;
  uint32_t num_slots_;
};

inline void check_ok(const Status& status) {
  INFO((status.problem == nullptr ? "" : status.problem));
  CHECK(status.ok());
}

}  // namespace muster::kernels::cuda
