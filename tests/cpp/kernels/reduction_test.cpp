// Every instruction set gives the bits that a plain evaluation of the tree gives.
#include <algorithm>
#include <optional>
#include <utility>

#include "cpp/catch.h"
#include "cpp/kernels/support.h"

using namespace muster::kernels;
using namespace muster::kernels::testing;

namespace {

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
          // In place, into every source that is present, and for odd counts into a fresh vector first.
          std::vector<T> fresh = expected;
          std::vector<void*> destinations;
          if (n % 2 == 1) {
            fresh.assign(n, T{});
            destinations.push_back(fresh.data());
          }
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

TEMPLATE_TEST_CASE("low precision on the way: rounded once, added in fp32", "[kernels]", c10::BFloat16, c10::Half) {
  using T = TestType;
  std::mt19937_64 random(17);
  const int ranks = GENERATE(1, 2, 3, 5);
  for (const size_t n : kSizes) {
    std::vector<std::vector<float>> exact(static_cast<size_t>(ranks), std::vector<float>(n));
    for (auto& values : exact) {
      for (float& value : values) value = draw<float>(random);
    }
    for (const NamedTable& isa : tables()) {
      INFO(isa.name << ", " << n << " elements of " << ranks << " ranks");
      std::vector<std::vector<T>> low;
      std::vector<std::vector<float>> widened;
      std::vector<const void*> low_sources, wide_sources;
      for (const auto& values : exact) {
        low.emplace_back(n);
        isa.table->narrow(dtype_of<T>(), low.back().data(), values.data(), n);
        CHECK(std::equal(values.begin(), values.end(), low.back().begin(),
                         [](float value, T rounded) { return same_bits(static_cast<T>(value), rounded); }));
        widened.emplace_back(low.back().begin(), low.back().end());
      }
      for (size_t r = 0; r < low.size(); ++r) {
        low_sources.push_back(r == 3 ? nullptr : low[r].data());
        wide_sources.push_back(r == 3 ? nullptr : widened[r].data());
      }
      std::vector<float> sum(n), expected(n);
      void* destination = expected.data();
      isa.table->tree_reduce(DType::f32, Reduction::sum, wide_sources.data(), ranks, &destination, 1, n);
      isa.table->sum_widened(dtype_of<T>(), low_sources.data(), ranks, sum.data(), n);
      CHECK(same_values(sum, expected));

      std::vector<double> partials(num_tiles(n)), expected_partials(num_tiles(n));
      const ReduceSegment segment{low_sources.data(), sum.data(), partials.data(), n};
      reduce_stats(dtype_of<T>(), ranks, &segment, 1);
      const StatsSegment stats{expected.data(), expected_partials.data(), n, DType::f32};
      grad_stats(&stats, 1);
      CHECK(same_values(sum, expected));
      CHECK(partials == expected_partials);
    }
  }
}
