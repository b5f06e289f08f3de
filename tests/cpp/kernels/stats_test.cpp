#include <algorithm>

#include "cpp/catch.h"
#include "cpp/kernels/support.h"
#include "kernels/math.h"

using namespace muster::kernels;
using namespace muster::kernels::testing;

namespace {

// As the contract has it, element by element.
template <class T>
std::vector<double> plain_partials(const T* values, size_t n) {
  std::vector<double> partials;
  for (size_t begin = 0; begin < n; begin += kTile) {
    double lanes[kLanes] = {};
    for (size_t i = begin; i < std::min(n, begin + kTile); ++i) {
      lanes[(i - begin) % kLanes] += static_cast<double>(values[i]) * static_cast<double>(values[i]);
    }
    for (size_t half = kLanes / 2; half > 0; half /= 2) {
      for (size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    partials.push_back(lanes[0]);
  }
  return partials;
}

}  // namespace

TEMPLATE_TEST_CASE("grad_stats adds in one order everywhere", "[kernels]", float, double) {
  using T = TestType;
  std::mt19937_64 random(5);
  for (const bool special : {false, true}) {
    std::vector<std::vector<T>> gradients;
    std::vector<std::vector<double>> expected;
    for (const size_t n : kSizes) {
      std::vector<T> values(n + 1);
      for (T& value : values) value = special ? draw_special<T>(random) : draw<T>(random);
      expected.push_back(plain_partials(values.data() + 1, n));
      gradients.push_back(std::move(values));
    }
    for (const NamedTable& isa : tables()) {
      std::vector<std::vector<double>> partials;
      std::vector<StatsSegment> segments;
      for (const auto& values : gradients) partials.emplace_back(num_tiles(values.size() - 1), -1.0);
      for (size_t k = 0; k < gradients.size(); ++k) {
        segments.push_back({gradients[k].data() + 1, partials[k].data(), gradients[k].size() - 1, dtype_of<T>()});
      }
      isa.table->grad_stats(segments.data(), segments.size());
      for (size_t k = 0; k < gradients.size(); ++k) {
        INFO(isa.name << " n " << segments[k].n << " special " << special);
        CHECK(same_values(partials[k], expected[k]));
      }
    }
  }
}

TEMPLATE_TEST_CASE("divide_with_stats divides and adds in one order everywhere", "[kernels]", float, double) {
  using T = TestType;
  std::mt19937_64 random(6);
  for (const size_t n : kSizes) {
    std::vector<T> values(n + 1);
    for (T& value : values) value = draw<T>(random);
    std::vector<T> divided = values;
    for (size_t i = 1; i <= n; ++i) divided[i] = values[i] / static_cast<T>(3.0);
    const auto expected = plain_partials(divided.data() + 1, n);
    for (const NamedTable& isa : tables()) {
      std::vector<T> got = values;
      std::vector<double> partials(num_tiles(n), -1);
      isa.table->divide_with_stats(dtype_of<T>(), got.data() + 1, n, 3.0, partials.data());
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

TEST_CASE("positive_power is the power", "[kernels]") {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> exponents(-300, 300), powers(0.05, 12);
  for (int i = 0; i < 2000; ++i) {
    const double x = std::pow(10, exponents(random)), p = powers(random);
    const double expected = std::pow(x, p);
    INFO(x << " ^ " << p);
    if (std::isinf(expected)) {
      CHECK(positive_power(x, p) == expected);
    } else {
      const double smallest = std::numeric_limits<double>::denorm_min();
      CHECK(std::abs(positive_power(x, p) - expected) <= 1e-12 * expected + smallest);
    }
  }
  CHECK(positive_power(0, 0.5) == 0);
  CHECK(positive_power(1, 3.7) == 1);
  CHECK(std::abs(positive_power(5e-324, 0.5) - std::sqrt(5e-324)) < 1e-170);
  CHECK(positive_power(1e200, 2) == std::numeric_limits<double>::infinity());
  CHECK(positive_power(1e-200, 2) == 0);
  CHECK(positive_power(std::numeric_limits<double>::infinity(), 0.5) == std::numeric_limits<double>::infinity());
  CHECK(std::isnan(positive_power(std::numeric_limits<double>::quiet_NaN(), 0.5)));
}

TEMPLATE_TEST_CASE("norms of other types than 2", "[kernels]", float, double) {
  const double infinity = std::numeric_limits<double>::infinity();
  std::mt19937_64 random(8);
  for (const double norm_type : {0.5, 1.0, 3.0, infinity}) {
    for (const size_t n : kSizes) {
      std::vector<TestType> values(n);
      for (TestType& value : values) value = draw<TestType>(random);
      std::vector<double> partials(num_tiles(n), -1);
      const StatsSegment segment{values.data(), partials.data(), n, dtype_of<TestType>()};
      grad_stats(&segment, 1, norm_type);
      for (size_t tile = 0; tile < partials.size(); ++tile) {
        double expected = 0;
        for (size_t i = tile * kTile; i < std::min(n, (tile + 1) * kTile); ++i) {
          const double magnitude = std::abs(static_cast<double>(values[i]));
          expected = norm_type == infinity ? std::max(expected, magnitude) : expected + std::pow(magnitude, norm_type);
        }
        INFO("type " << norm_type << " n " << n << " tile " << tile);
        CHECK(std::abs(partials[tile] - expected) <= 1e-11 * expected);
      }
    }
    std::vector<TestType> values(3 * kTile, 1);
    values[kTile + 13] = static_cast<TestType>(std::numeric_limits<double>::quiet_NaN());
    double partials[3];
    const StatsSegment segment{values.data(), partials, values.size(), dtype_of<TestType>()};
    grad_stats(&segment, 1, norm_type);
    CHECK(std::isfinite(partials[0]));
    CHECK(std::isnan(partials[1]));
    CHECK(std::isfinite(partials[2]));
  }
}

TEST_CASE("a sum's statistics are those of the type asked for", "[kernels]") {
  const std::vector<float> first(kTile + 5, 3), second(kTile + 5, -4);
  const void* gradients[] = {first.data(), second.data()};
  std::vector<float> sum(first.size());
  double partials[2];
  const ReduceSegment segment{gradients, sum.data(), partials, first.size()};
  reduce_stats(DType::f32, 2, &segment, 1, std::numeric_limits<double>::infinity());
  CHECK(partials[0] == 1);
  CHECK(partials[1] == 1);
  reduce_stats(DType::f32, 2, &segment, 1, 1);
  CHECK(partials[0] == kTile);
  CHECK(partials[1] == 5);
}
