// Compiled once per instruction set with MUSTER_ISA naming it. Everything is in an anonymous namespace or static and
// always inlined, and no library template is instantiated, so that no function of this object can stand in for another
// object's. The loops are plain and vectorised by the compiler; `ivdep` says what the contracts say: iterations touch
// equal indices only.
#include "kernels/cpu/isa_table.h"
#include "kernels/math.h"

namespace muster::kernels::MUSTER_ISA {
namespace {

#define MUSTER_INLINE __attribute__((always_inline)) inline

// --- element types -------------------------------------------------------------------------------------------------

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
  const double* factors = nullptr;  // by source, or null

  const Storage* source(int s) const noexcept { return static_cast<const Storage*>(sources[s]) + begin; }

  static void combine(Wide* out, const Wide* a, const Wide* b, size_t n) noexcept {
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) out[i] = Op::apply(a[i], b[i]);
  }

  static void widen_all(Wide* out, const Storage* in, size_t n) noexcept {
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) out[i] = E::load(in[i]);
  }

  static void scale_all(Wide* out, const Storage* in, size_t n, Wide factor) noexcept {
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) out[i] = factor * E::load(in[i]);
  }

  // The subtree over [first, last) as Wide values, in a source itself where nothing has to be computed, else in
  // scratch[level]; null where all are absent.
  const Wide* node(int first, int last, int level) noexcept {
    int only = 0;
    const int count = present(sources, first, last, only);
    if (count == 0) return nullptr;
    if (count == 1) {
      if (factors != nullptr && factors[only] != 1) {
        scale_all(scratch[level].values, source(only), n, static_cast<Wide>(factors[only]));
        return scratch[level].values;
      }
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

constexpr size_t kAheadBytes = 4096;  // the processor's own prefetching ends at the page
constexpr size_t kStripBytes = 128;
constexpr size_t kLineBytes = 64;

// Fetches what lies kAheadBytes beyond the kCount values from `i` on, of `n` in all.
template <size_t kCount, class T>
MUSTER_INLINE void fetch_ahead(const T* values, size_t i, size_t n) noexcept {
  constexpr size_t kAhead = kAheadBytes / sizeof(T);
  if (i + kAhead + kCount > n) return;
  for (size_t k = 0; k < kCount; k += kLineBytes / sizeof(T)) __builtin_prefetch(values + i + kAhead + k);
}

template <class E, class Op, int kSources>
MUSTER_INLINE typename E::Storage tree_of(const typename E::Storage* const* in, size_t i) noexcept {
  const typename E::Wide left = Op::apply(E::load(in[0][i]), E::load(in[1][i]));
  if constexpr (kSources == 2) return E::store(left);
  return E::store(Op::apply(left, Op::apply(E::load(in[2][i]), E::load(in[3][i]))));
}

template <class E, class Op, int kSources>
MUSTER_INLINE void store_tree(typename E::Storage* const* out, const typename E::Storage* const* in, size_t begin,
                              size_t end) noexcept {
#pragma GCC ivdep
  for (size_t i = begin; i < end; ++i) {
    const typename E::Storage value = tree_of<E, Op, kSources>(in, i);
    for (int s = 0; s < kSources; ++s) out[s][i] = value;
  }
}

// All of a small tree in one pass, into as many destinations; in place, those are in the cache by then.
template <class E, class Op, int kSources>
void reduce_few(const void* const* sources, void* const* destinations, int num_destinations, size_t n) noexcept {
  using Storage = typename E::Storage;
  constexpr size_t kStrip = kStripBytes / sizeof(Storage);
  const Storage* in[kSources];
  Storage* out[kSources];
  for (int s = 0; s < kSources; ++s) {
    in[s] = static_cast<const Storage*>(sources[s]);
    out[s] = static_cast<Storage*>(destinations[s < num_destinations ? s : 0]);
  }
  const size_t fetched = gains_from_hints() ? n : 0;
  size_t i = 0;
  for (; i + kStrip <= n; i += kStrip) {
    for (int s = 0; s < kSources; ++s) fetch_ahead<kStrip>(in[s], i, fetched);
    store_tree<E, Op, kSources>(out, in, i, i + kStrip);
  }
  store_tree<E, Op, kSources>(out, in, i, n);
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
  int only = 0;
  const bool is_whole = present(sources, 0, num_sources, only) == num_sources;
  if (is_whole && num_sources == 2 && num_destinations <= 2) {
    return reduce_few<E, Op, 2>(sources, destinations, num_destinations, n);
  }
  if (is_whole && num_sources == 4 && num_destinations <= 4) {
    return reduce_few<E, Op, 4>(sources, destinations, num_destinations, n);
  }
  alignas(64) Block<E> scratch[kMaxLevels];
  for (size_t begin = 0; begin < n; begin += Block<E>::kSize) {
    const size_t count = n - begin < Block<E>::kSize ? n - begin : Block<E>::kSize;
    Tree<E, Op> tree{sources, begin, count, scratch};
    Storage* first = static_cast<Storage*>(destinations[0]) + begin;
    const typename E::Wide* result = tree.node(0, num_sources, 0);
    if (result == nullptr) return;
    if (static_cast<const void*>(result) != first) store_all<E>(first, result, count);
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

template <class E, bool kScaled>
void pack_values(typename E::Wide* destination, const typename E::Storage* source, size_t n, bool accumulate,
                 typename E::Wide factor) noexcept {
  if (accumulate) {
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) {
      destination[i] = destination[i] + (kScaled ? factor * E::load(source[i]) : E::load(source[i]));
    }
  } else {
#pragma GCC ivdep
    for (size_t i = 0; i < n; ++i) destination[i] = kScaled ? factor * E::load(source[i]) : E::load(source[i]);
  }
}

template <class E>
void pack_one(const PackItem& item, bool accumulate, double factor) noexcept {
  using Wide = typename E::Wide;
  const auto* source = static_cast<const typename E::Storage*>(item.source);
  auto* destination = static_cast<Wide*>(item.destination);
  if (source == nullptr) {
    if (!accumulate && item.n != 0) __builtin_memset(destination, 0, item.n * sizeof(Wide));
  } else if (factor == 1) {
    pack_values<E, false>(destination, source, item.n, accumulate, 1);
  } else {
    pack_values<E, true>(destination, source, item.n, accumulate, static_cast<Wide>(factor));
  }
}

void pack(const PackItem* items, size_t count, bool accumulate, double factor) noexcept {
  for (size_t k = 0; k < count; ++k) {
    switch (items[k].source_dtype) {
      case DType::f64:
        pack_one<Plain<double, double>>(items[k], accumulate, factor);
        break;
      case DType::bf16:
        pack_one<Low<BFloat16>>(items[k], accumulate, factor);
        break;
      case DType::f16:
        pack_one<Low<Half>>(items[k], accumulate, factor);
        break;
      default:
        pack_one<Plain<float, float>>(items[k], accumulate, factor);
        break;
    }
  }
}

// --- statistics ----------------------------------------------------------------------------------------------------

// The sums of squares, by tile, of n values; `value(i)` gives each once, in order, `fetch(i)` is called before every
// kLanes of them.
template <class Value, class Fetch>
MUSTER_INLINE void all_squares(size_t n, double* partials, Value value, Fetch fetch) noexcept {
  for (size_t begin = 0; begin < n; begin += kTile) {
    const size_t end = n - begin < kTile ? n : begin + kTile;
    alignas(64) double lanes[kLanes] = {};
    size_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      fetch(i);
#pragma GCC ivdep
      for (size_t lane = 0; lane < kLanes; ++lane) {
        const auto wide = static_cast<double>(value(i + lane));
        lanes[lane] = lanes[lane] + wide * wide;
      }
    }
    for (size_t lane = 0; i < end; ++i, ++lane) {
      const auto wide = static_cast<double>(value(i));
      lanes[lane] = lanes[lane] + wide * wide;
    }
    for (size_t half = kLanes / 2; half > 0; half /= 2) {
      for (size_t lane = 0; lane < half; ++lane) lanes[lane] = lanes[lane] + lanes[lane + half];
    }
    *partials++ = lanes[0];
  }
}

template <class T>
void squares(const void* array, size_t n, double* partials) noexcept {
  const auto* const values = static_cast<const T*>(array);
  all_squares(n, partials, [=](size_t i) { return values[i]; }, [=](size_t i) { fetch_ahead<kLanes>(values, i, n); });
}

void grad_stats(const StatsSegment* segments, size_t count) noexcept {
  for (size_t k = 0; k < count; ++k) {
    const StatsSegment& segment = segments[k];
    (segment.dtype == DType::f64 ? squares<double> : squares<float>)(segment.gradient, segment.n, segment.partials);
  }
}

template <class T>
void divide_all(void* array, size_t n, T divisor, double* partials) noexcept {
  auto* const values = static_cast<T*>(array);
  all_squares(
      n, partials, [=](size_t i) { return values[i] = values[i] / divisor; },
      [=](size_t i) { fetch_ahead<kLanes>(values, i, n); });
}

void divide_with_stats(DType dtype, void* values, size_t n, double divisor, double* partials) noexcept {
  if (dtype == DType::f64) return divide_all<double>(values, n, divisor, partials);
  divide_all<float>(values, n, static_cast<float>(divisor), partials);
}

// All of a small tree and its statistics in one pass.
template <class T, int kSources>
void sum_few_with_stats(const void* const* sources, void* destination, size_t n, double* partials) noexcept {
  const T* in[kSources];
  for (int s = 0; s < kSources; ++s) in[s] = static_cast<const T*>(sources[s]);
  auto* const sums = static_cast<T*>(destination);
  const size_t fetched = gains_from_hints() ? n : 0;
  all_squares(
      n, partials, [&](size_t i) { return sums[i] = tree_of<Plain<T, T>, Sum, kSources>(in, i); },
      [&](size_t i) {
        for (int s = 0; s < kSources; ++s) fetch_ahead<kLanes>(in[s], i, fetched);
      });
}

template <class T>
void sum_all_with_stats(const void* const* sources, int num_sources, void* destination, size_t n,
                        double* partials) noexcept {
  int only = 0;
  const bool is_whole = present(sources, 0, num_sources, only) == num_sources;
  if (is_whole && num_sources == 2) return sum_few_with_stats<T, 2>(sources, destination, n, partials);
  if (is_whole && num_sources == 4) return sum_few_with_stats<T, 4>(sources, destination, n, partials);
  reduce<Plain<T, T>, Sum>(sources, num_sources, &destination, 1, n);
  squares<T>(destination, n, partials);
}

void sum_with_stats(DType dtype, const void* const* sources, int num_sources, void* destination, size_t n,
                    double* partials) noexcept {
  (dtype == DType::f64 ? sum_all_with_stats<double> : sum_all_with_stats<float>)(sources, num_sources, destination, n,
                                                                                 partials);
}

template <class T>
void sum_all_scaled(const void* const* sources, const double* factors, int num_sources, T* destination,
                    size_t n) noexcept {
  using E = Plain<T, T>;
  alignas(64) Block<E> scratch[kMaxLevels];
  for (size_t begin = 0; begin < n; begin += Block<E>::kSize) {
    const size_t count = n - begin < Block<E>::kSize ? n - begin : Block<E>::kSize;
    Tree<E, Sum> tree{sources, begin, count, scratch, factors};
    const T* result = tree.node(0, num_sources, 0);
    if (result == nullptr) return;
    if (result != destination + begin) __builtin_memcpy(destination + begin, result, count * sizeof(T));
  }
}

void sum_scaled(DType dtype, const void* const* sources, const double* factors, int num_sources, void* destination,
                size_t n) noexcept {
  if (dtype == DType::f64) {
    return sum_all_scaled(sources, factors, num_sources, static_cast<double*>(destination), n);
  }
  sum_all_scaled(sources, factors, num_sources, static_cast<float*>(destination), n);
}

// --- low precision on the way --------------------------------------------------------------------------------------

void narrow(DType dtype, void* destination, const float* source, size_t n) noexcept {
  if (dtype == DType::bf16) return store_all<Low<BFloat16>>(static_cast<BFloat16*>(destination), source, n);
  store_all<Low<Half>>(static_cast<Half*>(destination), source, n);
}

template <class E>
void sum_all_widened(const void* const* sources, int num_sources, float* destination, size_t n) noexcept {
  alignas(64) Block<E> scratch[kMaxLevels];
  for (size_t begin = 0; begin < n; begin += Block<E>::kSize) {
    const size_t count = n - begin < Block<E>::kSize ? n - begin : Block<E>::kSize;
    Tree<E, Sum> tree{sources, begin, count, scratch};
    const float* result = tree.node(0, num_sources, 0);
    if (result == nullptr) return;
    __builtin_memcpy(destination + begin, result, count * sizeof(float));
  }
}

void sum_widened(DType dtype, const void* const* sources, int num_sources, float* destination, size_t n) noexcept {
  if (dtype == DType::bf16) return sum_all_widened<Low<BFloat16>>(sources, num_sources, destination, n);
  sum_all_widened<Low<Half>>(sources, num_sources, destination, n);
}

}  // namespace

extern const IsaTable kTable = {&tree_reduce,    &pack,   &grad_stats,  &divide_with_stats,
                                &sum_with_stats, &narrow, &sum_widened, &sum_scaled};

}  // namespace muster::kernels::MUSTER_ISA
