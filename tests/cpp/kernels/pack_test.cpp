#include "cpp/catch.h"
#include "cpp/kernels/support.h"

using namespace muster::kernels;
using namespace muster::kernels::testing;

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

TEMPLATE_TEST_CASE("pack multiplies by a factor in the destination's dtype", "[kernels]", float, double, c10::BFloat16,
                   c10::Half) {
  using T = TestType;
  using W = Wide<T>;
  std::mt19937_64 random(11);
  for (const double factor : {1.0, 0.1, -0.25}) {
    for (const size_t n : kSizes) {
      std::vector<T> source(n + 1);
      for (T& value : source) value = static_cast<T>(draw_special<W>(random));
      std::vector<W> before(n + 1);
      for (W& value : before) value = draw<W>(random);
      for (const bool accumulate : {false, true}) {
        std::vector<W> expected = before;
        for (size_t i = 1; i <= n; ++i) {
          const W scaled = factor == 1 ? static_cast<W>(source[i]) : static_cast<W>(factor) * static_cast<W>(source[i]);
          expected[i] = accumulate ? before[i] + scaled : scaled;
        }
        for (const NamedTable& isa : tables()) {
          std::vector<W> got = before;
          const PackItem item{source.data() + 1, dtype_of<T>(), got.data() + 1, n};  // off the vector's alignment
          isa.table->pack(&item, 1, accumulate, factor);
          INFO(isa.name << " n " << n << " factor " << factor << " accumulate " << accumulate);
          CHECK(same_values(got, expected));
        }
      }
    }
  }
}

TEST_CASE("what is too large for a cache is packed alike", "[kernels]") {
  std::mt19937_64 random(13);
  std::vector<float> source(kStreamedSize + 1);
  for (float& value : source) value = draw_special<float>(random);
  std::vector<c10::BFloat16> low(33);
  for (auto& value : low) value = static_cast<c10::BFloat16>(draw<float>(random));
  std::vector<double> wide(17, 0.1);
  std::vector<float> destination(kStreamedSize + 3, 7), widened(33, 7), cleared(5, 7);
  std::vector<double> wide_destination(17, 7);
  const PackItem items[] = {{source.data() + 1, DType::f32, destination.data() + 1, kStreamedSize},
                            {low.data(), DType::bf16, widened.data(), 33},
                            {nullptr, DType::f32, cleared.data(), 5},
                            {wide.data(), DType::f64, wide_destination.data(), 17}};
  pack(items, 4, false);
  CHECK(destination.front() == 7);
  CHECK(std::vector<float>(destination.end() - 2, destination.end()) == std::vector<float>{7, 7});
  CHECK(same_values({destination.begin() + 1, destination.end() - 2},
                    std::vector<float>(source.begin() + 1, source.end())));
  CHECK(widened == std::vector<float>(low.begin(), low.end()));
  CHECK(cleared == std::vector<float>(5));
  CHECK(wide_destination == wide);

  std::vector<float> twice = destination;
  pack(items, 4, true);
  for (size_t i = 1; i <= kStreamedSize; ++i) twice[i] += source[i];
  CHECK(same_values(destination, twice));
}
