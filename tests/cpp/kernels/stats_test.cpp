#include <algorithm>

#include "cpp/catch.h"
#include "cpp/kernels/support.h"

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
