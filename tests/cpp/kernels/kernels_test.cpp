// Every instruction set gives the bits that a plain evaluation of the contract gives.
#include "kernels/kernels.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <type_traits>
#include <vector>

#include "cpp/catch.h"
#include "kernels/cpu/dispatch.h"

using namespace muster::kernels;

namespace {

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

template <class W>
W apply(Reduction reduction, W a, W b) {
  if (reduction == Reduction::sum) {
    if constexpr (std::is_integral_v<W>) {
      return static_cast<W>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
    } else {
      return a + b;
    }
  }
  if (a != a) return a;
  if (b != b) return b;
  return reduction == Reduction::min ? std::min(a, b) : std::max(a, b);
}

// The tree as its definition has it: neighbours in pairs, level by level; an absent one leaves its sibling unchanged.
template <class W>
std::optional<W> tree(Reduction reduction, std::vector<std::optional<W>> level) {
  while (level.size() > 1) {
    std::vector<std::optional<W>> next;
    for (size_t i = 0; i < level.size(); i += 2) {
      const bool has_pair = i + 1 < level.size() && level[i] && level[i + 1];
      next.push_back(has_pair ? apply(reduction, *level[i], *level[i + 1])
                              : (level[i] || i + 1 == level.size() ? level[i] : level[i + 1]));
    }
    level = std::move(next);
  }
  return level[0];
}

std::vector<NamedTable> tables() {
  size_t count = 0;
  const NamedTable* first = usable_tables(count);
  return {first, first + count};
}

template <class T>
bool same_bits(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}

}  // namespace

TEMPLATE_TEST_CASE("tree_reduce: every instruction set, source count, absence and size", "[kernels]", float, double,
                   c10::BFloat16, c10::Half, int64_t, int32_t, int16_t, int8_t, uint8_t) {
  using T = TestType;
  std::mt19937_64 random(7);
  for (const NamedTable& isa : tables()) {
    for (const Reduction reduction : {Reduction::sum, Reduction::min, Reduction::max}) {
      for (int sources = 1; sources <= 9; ++sources) {
        for (const size_t n : {1UL, 5UL, 64UL, 1031UL, 5000UL}) {
          std::vector<std::vector<T>> data(static_cast<size_t>(sources));
          std::vector<const void*> pointers;
          const uint64_t absent = sources == 1 ? 0 : random() & random();
          for (size_t s = 0; s < data.size(); ++s) {
            for (size_t i = 0; i < n + 1; ++i) data[s].push_back(draw<T>(random));
            pointers.push_back((absent >> s) & 1 ? nullptr : data[s].data() + 1);  // off the vector's alignment
          }
          std::vector<T> expected(n);
          bool any = false;
          for (size_t i = 0; i < n; ++i) {
            std::vector<std::optional<Wide<T>>> leaves;
            for (size_t s = 0; s < data.size(); ++s) {
              leaves.push_back(pointers[s] ? std::optional<Wide<T>>(static_cast<Wide<T>>(data[s][i + 1]))
                                           : std::nullopt);
            }
            const auto result = tree<Wide<T>>(reduction, leaves);
            any = result.has_value();
            if (any) expected[i] = static_cast<T>(*result);
          }
          // Into a fresh vector and, in place, into every source that is present.
          std::vector<T> fresh(n);
          std::vector<void*> destinations{fresh.data()};
          for (size_t s = 0; s < data.size(); ++s) {
            if (pointers[s]) destinations.push_back(data[s].data() + 1);
          }
          isa.table->tree_reduce(dtype_of<T>(), reduction, pointers.data(), sources, destinations.data(),
                                 static_cast<int>(destinations.size()), n);
          if (!any) continue;
          bool equal = std::memcmp(fresh.data(), expected.data(), n * sizeof(T)) == 0;
          for (size_t s = 0; s < data.size(); ++s) {
            if (pointers[s]) equal = equal && std::memcmp(data[s].data() + 1, expected.data(), n * sizeof(T)) == 0;
          }
          INFO(isa.name << " sources " << sources << " n " << n);
          REQUIRE(equal);
        }
      }
    }
  }
}

TEST_CASE("booleans: a sum is or", "[kernels]") {
  const uint8_t a[] = {0, 0, 1, 1}, b[] = {0, 1, 0, 1};
  const void* sources[] = {a, b};
  uint8_t out[4];
  void* destinations[] = {out};
  tree_reduce(DType::boolean, Reduction::sum, sources, 2, destinations, 1, 4);
  CHECK(std::vector<int>(out, out + 4) == std::vector<int>{0, 1, 1, 1});
  tree_reduce(DType::boolean, Reduction::min, sources, 2, destinations, 1, 4);
  CHECK(std::vector<int>(out, out + 4) == std::vector<int>{0, 0, 0, 1});
}

TEST_CASE("min and max propagate NaN from every source", "[kernels]") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const NamedTable& isa : tables()) {
    for (int bad = 0; bad < 3; ++bad) {
      std::vector<std::vector<float>> data(3, std::vector<float>(33, 1.0F));
      data[static_cast<size_t>(bad)].assign(33, nan);
      const void* sources[] = {data[0].data(), data[1].data(), data[2].data()};
      std::vector<float> out(33);
      void* destinations[] = {out.data()};
      for (const Reduction reduction : {Reduction::min, Reduction::max}) {
        isa.table->tree_reduce(DType::f32, reduction, sources, 3, destinations, 1, 33);
        for (const float value : out) REQUIRE(std::isnan(value));
      }
    }
  }
}

// A lone low-precision source passes through fp32 and back.
TEMPLATE_TEST_CASE("low precision: every value widens and narrows as c10 has it", "[kernels]", c10::BFloat16,
                   c10::Half) {
  using T = TestType;
  std::vector<T> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = T(static_cast<uint16_t>(i), T::from_bits());
  std::mt19937_64 random(3);
  std::vector<T> other(all.size());
  for (T& value : other) value = all[random() % all.size()];
  for (const NamedTable& isa : tables()) {
    std::vector<float> widened(all.size());
    const PackItem item{all.data(), dtype_of<T>(), widened.data(), all.size()};
    isa.table->pack(&item, 1, false, 1);
    std::vector<T> sum(all.size());
    const void* sources[] = {all.data(), other.data()};
    void* destinations[] = {sum.data()};
    isa.table->tree_reduce(dtype_of<T>(), Reduction::sum, sources, 2, destinations, 1, all.size());
    bool widens = true, adds = true;
    for (size_t i = 0; i < all.size(); ++i) {
      const auto expected = static_cast<float>(all[i]);
      const float total = expected + static_cast<float>(other[i]);
      widens = widens && (std::isnan(expected) ? std::isnan(widened[i]) : same_bits(widened[i], expected));
      const T rounded = static_cast<T>(total);
      adds = adds && (std::isnan(total) ? std::isnan(static_cast<float>(sum[i])) : same_bits(sum[i], rounded));
    }
    INFO(isa.name);
    CHECK(widens);
    CHECK(adds);
  }
}

TEST_CASE("pack overwrites, accumulates and clears", "[kernels]") {
  for (const NamedTable& isa : tables()) {
    std::vector<float> destination{1, 2, 3}, source{10, 20, 30};
    std::vector<double> wide_destination{1, 2, 3}, wide_source{0.1, 0.2, 0.3};
    PackItem items[] = {{source.data(), DType::f32, destination.data(), 3},
                        {wide_source.data(), DType::f64, wide_destination.data(), 3}};
    isa.table->pack(items, 2, true, 1);
    CHECK(destination == std::vector<float>{11, 22, 33});
    CHECK(wide_destination == std::vector<double>{1.1, 2.2, 3.3});
    isa.table->pack(items, 2, false, 1);
    CHECK(destination == source);
    items[0].source = items[1].source = nullptr;
    isa.table->pack(items, 2, true, 1);
    CHECK(destination == source);
    CHECK(wide_destination == wide_source);
    isa.table->pack(items, 2, false, 1);
    CHECK(destination == std::vector<float>(3));
    CHECK(wide_destination == std::vector<double>(3));
  }
}

TEMPLATE_TEST_CASE("divide_with_stats adds in one order everywhere", "[kernels]", float, double) {
  using T = TestType;
  std::mt19937_64 random(5);
  for (const size_t n : {0UL, 1UL, 15UL, 17UL, kTile - 1, kTile, kTile + 1, 3 * kTile + 77}) {
    std::vector<T> values(n);
    for (T& value : values) value = draw<T>(random);
    std::vector<T> divided = values;
    std::vector<double> expected;
    for (size_t begin = 0; begin < n; begin += kTile) {
      double lanes[kLanes] = {};
      for (size_t i = begin; i < std::min(n, begin + kTile); ++i) {
        divided[i] = values[i] / static_cast<T>(3.0);
        lanes[(i - begin) % kLanes] += static_cast<double>(divided[i]) * static_cast<double>(divided[i]);
      }
      for (size_t half = kLanes / 2; half > 0; half /= 2) {
        for (size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
      }
      expected.push_back(lanes[0]);
    }
    for (const NamedTable& isa : tables()) {
      std::vector<T> got = values;
      std::vector<double> partials(num_tiles(n), -1);
      isa.table->divide_with_stats(dtype_of<T>(), got.data(), n, 3.0, partials.data());
      INFO(isa.name << " n " << n);
      CHECK(got == divided);
      CHECK(partials == expected);
    }
  }
}

TEST_CASE("a value that is not finite shows in its tile alone", "[kernels]") {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    for (const NamedTable& isa : tables()) {
      std::vector<float> values(3 * kTile, std::numeric_limits<float>::max());
      values[kTile + 13] = bad;
      double partials[3];
      isa.table->divide_with_stats(DType::f32, values.data(), values.size(), 1.0, partials);
      CHECK(std::isfinite(partials[0]));
      CHECK_FALSE(std::isfinite(partials[1]));
      CHECK(std::isfinite(partials[2]));
    }
  }
}

TEST_CASE("scale multiplies in the dtype", "[kernels]") {
  for (const NamedTable& isa : tables()) {
    std::vector<float> values{1.0F, 3.0F, 7.0F};
    isa.table->scale(DType::f32, values.data(), 3, 0.1);
    CHECK(values == std::vector<float>{1.0F * 0.1F, 3.0F * 0.1F, 7.0F * 0.1F});
    std::vector<double> wide{1.0, 3.0};
    isa.table->scale(DType::f64, wide.data(), 2, 0.1);
    CHECK(wide == std::vector<double>{1.0 * 0.1, 3.0 * 0.1});
  }
}
