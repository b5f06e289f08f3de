// Compiled once per instruction set with MUSTER_ISA naming it. Everything is in an anonymous namespace and no library
// template is instantiated, so that no function of this object can stand in for another object's. The loops are plain
// and vectorised by the compiler; `ivdep` says what the contracts say: iterations touch equal indices only.
#include "kernels/cpu/isa_table.h"

namespace muster::kernels::MUSTER_ISA {
namespace {

#define MUSTER_INLINE __attribute__((always_inline)) inline

// --- element types -------------------------------------------------------------------------------------------------

template <class To, class From>
MUSTER_INLINE To bits_as(From from) noexcept {
  To to;
  static_assert(sizeof(To) == sizeof(From));
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

MUSTER_INLINE float widen(BFloat16 value) noexcept { return bits_as<float>(static_cast<uint32_t>(value.bits) << 16); }

// The exponent is moved by a multiplication, which also normalises subnormals; infinities and NaN are mended after it.
MUSTER_INLINE float widen(Half value) noexcept {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(value.bits & 0x7fffu) << 13;
  const uint32_t finite = bits_as<uint32_t>(bits_as<float>(magnitude) * bits_as<float>(0x77800000u));  // * 2^112
  const uint32_t special = magnitude | 0x7f800000u;
  return bits_as<float>(sign | (magnitude >= 0x0f800000u ? special : finite));
}

template <class T>
MUSTER_INLINE T narrow(float value) noexcept;

template <>
MUSTER_INLINE BFloat16 narrow<BFloat16>(float value) noexcept {
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded)};
}

// Three cases by magnitude, each computed for every value and selected: normal halves round in the integer domain,
// subnormal ones by adding 0.5f, which puts the rounding position at the last bit of the sum.
template <>
MUSTER_INLINE Half narrow<Half>(float value) noexcept {
  const uint32_t bits = bits_as<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  return {static_cast<uint16_t>(sign | (magnitude >= 0x477ff000u ? special : finite))};
}

// Storage: what lies in memory. Wide: what is added.
template <class S, class W>
struct Plain {
  using Storage = S;
  using Wide = W;
  static constexpr bool kWidens = false;
  static MUSTER_INLINE Wide load(Storage value) noexcept { return static_cast<Wide>(value); }
  static MUSTER_INLINE Storage store(Wide value) noexcept { return static_cast<Storage>(value); }
};
template <class S>
struct Low {
  using Storage = S;
  using Wide = float;
  static constexpr bool kWidens = true;
  static MUSTER_INLINE Wide load(Storage value) noexcept { return widen(value); }
  static MUSTER_INLINE Storage store(Wide value) noexcept { return narrow<S>(value); }
};

struct Sum {
  template <class T>
  static MUSTER_INLINE T apply(T a, T b) noexcept {
    return static_cast<T>(a + b);
  }
};
struct Min {
  template <class T>
  static MUSTER_INLINE T apply(T a, T b) noexcept {
    return ((a < b) | (a != a)) ? a : b;
  }
};
struct Max {
  template <class T>
  static MUSTER_INLINE T apply(T a, T b) noexcept {
    return ((a > b) | (a != a)) ? a : b;
  }
};

// --- tree ----------------------------------------------------------------------------------------------------------

constexpr size_t kBlockBytes = 4096;  // per level of the tree; the levels of a deep tree stay in the first cache
constexpr int kMaxLevels = 32;

template <class E>
struct Block {
  static constexpr size_t kSize = kBlockBytes / sizeof(typename E::Wide);
  typename E::Wide values[kSize];
};

MUSTER_INLINE int split_point(int n) noexcept {
  int half = 1;
  while (half * 2 < n) half *= 2;
  return half;
}

MUSTER_INLINE int present(const void* const* sources, int first, int last, int& only) noexcept {
  int count = 0;
  for (int s = first; s < last; ++s) {
    if (sources[s] != nullptr) {
      ++count;
      only = s;
    }
  }
  return count;
}

template <class E, class Op>
struct Tree {
  using Storage = typename E::Storage;
  using Wide = typename E::Wide;

  const void* const* sources;
  size_t begin;
  size_t n;
  Block<E>* scratch;

  const Storage* source(int s) const noexcept { return static_cast<const Storage*>(sources[s]) + begin; }

  static void combine(Wide* out, const Wide* a, const Wide* b, size_t n) noexcept {
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) out[i] = Op::apply(a[i], b[i]);
  }

  static void widen_all(Wide* out, const Storage* in, size_t n) noexcept {
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) out[i] = E::load(in[i]);
  }

  // The subtree over [first, last) as Wide values, in a source itself where nothing has to be computed, else in
  // scratch[level]; null where all are absent.
  const Wide* node(int first, int last, int level) noexcept {
    int only = 0;
    const int count = present(sources, first, last, only);
    if (count == 0) return nullptr;
    if (count == 1) {
      if constexpr (E::kWidens) {
        widen_all(scratch[level].values, source(only), n);
        return scratch[level].values;
      } else {
        return reinterpret_cast<const Wide*>(source(only));
      }
    }
    const int middle = first + split_point(last - first);
    const Wide* left = node(first, middle, level);
    if (left == nullptr) return node(middle, last, level);
    const Wide* right = node(middle, last, level + 1);
    if (right == nullptr) return left;
    combine(scratch[level].values, left, right, n);
    return scratch[level].values;
  }
};

template <class E, class Op>
void store_pair(typename E::Storage* out, const typename E::Storage* a, const typename E::Storage* b,
                size_t n) noexcept {
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) out[i] = E::store(Op::apply(E::load(a[i]), E::load(b[i])));
}

template <class E>
void store_all(typename E::Storage* out, const typename E::Wide* in, size_t n) noexcept {
#pragma GCC ivdep
  for (size_t i = 0; i < n; ++i) out[i] = E::store(in[i]);
}

template <class E, class Op>
void reduce(const void* const* sources, int num_sources, void* const* destinations, int num_destinations,
            size_t n) noexcept {
  using Storage = typename E::Storage;
  if (num_destinations == 0) return;
  alignas(64) Block<E> scratch[kMaxLevels];
  const bool is_pair = num_sources == 2 && sources[0] != nullptr && sources[1] != nullptr;
  for (size_t begin = 0; begin < n; begin += Block<E>::kSize) {
    const size_t count = n - begin < Block<E>::kSize ? n - begin : Block<E>::kSize;
    Tree<E, Op> tree{sources, begin, count, scratch};
    Storage* first = static_cast<Storage*>(destinations[0]) + begin;
    if (is_pair) {
      store_pair<E, Op>(first, tree.source(0), tree.source(1), count);
    } else {
      const typename E::Wide* result = tree.node(0, num_sources, 0);
      if (result == nullptr) return;
      if (static_cast<const void*>(result) != first) store_all<E>(first, result, count);
    }
    for (int d = 1; d < num_destinations; ++d) {
      Storage* other = static_cast<Storage*>(destinations[d]) + begin;
      if (other != first) __builtin_memcpy(other, first, count * sizeof(Storage));
    }
  }
}

template <class E>
void reduce_by(Reduction reduction, const void* const* sources, int num_sources, void* const* destinations,
               int num_destinations, size_t n) noexcept {
  switch (reduction) {
    case Reduction::sum:
      return reduce<E, Sum>(sources, num_sources, destinations, num_destinations, n);
    case Reduction::min:
      return reduce<E, Min>(sources, num_sources, destinations, num_destinations, n);
    case Reduction::max:
      return reduce<E, Max>(sources, num_sources, destinations, num_destinations, n);
  }
}

void tree_reduce(DType dtype, Reduction reduction, const void* const* sources, int num_sources,
                 void* const* destinations, int num_destinations, size_t n) noexcept {
  const auto call = [&](auto reducer) { reducer(reduction, sources, num_sources, destinations, num_destinations, n); };
  // Two's complement makes a wrapping sum the same for both signs; min and max need the sign.
  const bool is_sum = reduction == Reduction::sum;
  switch (dtype) {
    case DType::f32:
      return call(reduce_by<Plain<float, float>>);
    case DType::f64:
      return call(reduce_by<Plain<double, double>>);
    case DType::bf16:
      return call(reduce_by<Low<BFloat16>>);
    case DType::f16:
      return call(reduce_by<Low<Half>>);
    case DType::i64:
      return is_sum ? call(reduce_by<Plain<uint64_t, uint64_t>>) : call(reduce_by<Plain<int64_t, int64_t>>);
    case DType::i32:
      return is_sum ? call(reduce_by<Plain<uint32_t, uint32_t>>) : call(reduce_by<Plain<int32_t, int32_t>>);
    case DType::i16:
      return is_sum ? call(reduce_by<Plain<uint16_t, uint16_t>>) : call(reduce_by<Plain<int16_t, int16_t>>);
    case DType::i8:
      return is_sum ? call(reduce_by<Plain<uint8_t, uint8_t>>) : call(reduce_by<Plain<int8_t, int8_t>>);
    case DType::u8:
      return call(reduce_by<Plain<uint8_t, uint8_t>>);
    case DType::boolean:
      if (is_sum) reduction = Reduction::max;
      return call(reduce_by<Plain<uint8_t, uint8_t>>);
  }
}

// --- pack ----------------------------------------------------------------------------------------------------------

template <class E>
void pack_one(const PackItem& item, bool accumulate) noexcept {
  using Wide = typename E::Wide;
  const auto* source = static_cast<const typename E::Storage*>(item.source);
  auto* destination = static_cast<Wide*>(item.destination);
  if (source == nullptr) {
    if (!accumulate) __builtin_memset(destination, 0, item.n * sizeof(Wide));
  } else if (accumulate) {
#pragma GCC ivdep
    for (size_t i = 0; i < item.n; ++i) destination[i] = destination[i] + E::load(source[i]);
  } else {
#pragma GCC ivdep
    for (size_t i = 0; i < item.n; ++i) destination[i] = E::load(source[i]);
  }
}

void pack(const PackItem* items, size_t count, bool accumulate) noexcept {
  for (size_t k = 0; k < count; ++k) {
    switch (items[k].source_dtype) {
      case DType::f64:
        pack_one<Plain<double, double>>(items[k], accumulate);
        break;
      case DType::bf16:
        pack_one<Low<BFloat16>>(items[k], accumulate);
        break;
      case DType::f16:
        pack_one<Low<Half>>(items[k], accumulate);
        break;
      default:
        pack_one<Plain<float, float>>(items[k], accumulate);
        break;
    }
  }
}

// --- statistics ----------------------------------------------------------------------------------------------------

constexpr size_t kLanes = 16;  // element i adds to lane i % 16, whatever the width of a vector

template <class T>
double divide_tile(T* values, size_t n, T divisor) noexcept {
  alignas(64) double lanes[kLanes] = {};
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
#pragma GCC ivdep
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const T value = values[i + lane] / divisor;
      values[i + lane] = value;
      lanes[lane] = lanes[lane] + static_cast<double>(value) * static_cast<double>(value);
    }
  }
  for (size_t lane = 0; i < n; ++i, ++lane) {
    const T value = values[i] / divisor;
    values[i] = value;
    lanes[lane] = lanes[lane] + static_cast<double>(value) * static_cast<double>(value);
  }
  for (size_t half = kLanes / 2; half > 0; half /= 2) {
    for (size_t lane = 0; lane < half; ++lane) lanes[lane] = lanes[lane] + lanes[lane + half];
  }
  return lanes[0];
}

template <class T>
void divide_all(void* values, size_t n, double divisor, double* partials) noexcept {
  auto* typed = static_cast<T*>(values);
  for (size_t begin = 0, tile = 0; begin < n; begin += kTile, ++tile) {
    partials[tile] = divide_tile(typed + begin, n - begin < kTile ? n - begin : kTile, static_cast<T>(divisor));
  }
}

void divide_with_stats(DType dtype, void* values, size_t n, double divisor, double* partials) noexcept {
  if (dtype == DType::f64) return divide_all<double>(values, n, divisor, partials);
  divide_all<float>(values, n, divisor, partials);
}

template <class T>
void scale_all(void* values, size_t n, T factor) noexcept {
  auto* typed = static_cast<T*>(values);
  for (size_t i = 0; i < n; ++i) typed[i] = typed[i] * factor;
}

void scale(DType dtype, void* values, size_t n, double factor) noexcept {
  if (dtype == DType::f64) return scale_all<double>(values, n, factor);
  scale_all<float>(values, n, static_cast<float>(factor));
}

}  // namespace

extern const IsaTable kTable = {&tree_reduce, &pack, &divide_with_stats, &scale};

}  // namespace muster::kernels::MUSTER_ISA
