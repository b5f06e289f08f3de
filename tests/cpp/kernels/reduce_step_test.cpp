// All-reduce and step in two passes: the bits of the single kernels.
#include <string>

#include "cpp/catch.h"
#include "cpp/kernels/support.h"

using namespace muster::kernels;
using namespace muster::kernels::testing;

namespace {

template <class T>
std::vector<T> drawn(size_t n, std::mt19937_64& random) {
  std::vector<T> values(n);
  for (T& value : values) value = draw<T>(random);
  return values;
}

constexpr AdamGroup kAdam{0.01, 0.9, 0.99, 1e-8, 0.1, true, false, false};

// One parameter, twice: stepped at once, and piece by piece with copies.
template <class T>
struct Stepped {
  std::vector<T> gradient, value, moment, variance;
  std::vector<uint16_t> low;

  Stepped(size_t n, std::mt19937_64& random)
      : gradient(drawn<T>(n, random)), value(drawn<T>(n, random)), moment(n), variance(n), low(n, 0x3c00) {}

  StepSegment segment(bool has_low) {
    return {gradient.data(),
            value.data(),
            has_low ? low.data() : nullptr,
            {moment.data(), variance.data(), nullptr},
            nullptr,
            nullptr,
            value.size(),
            0,
            DType::f16};
  }
};

}  // namespace

TEMPLATE_TEST_CASE("a sum with statistics is the sum and its statistics", "[kernels]", float, double) {
  std::mt19937_64 random(1);
  const int ranks = GENERATE(1, 2, 3, 4, 5);
  std::vector<size_t> sizes(std::begin(kSizes), std::end(kSizes));
  sizes.push_back(kStreamedSize);
  for (const size_t n : sizes) {
    std::vector<std::vector<TestType>> gradients;
    std::vector<const void*> sources;
    for (int r = 0; r < ranks; ++r) gradients.push_back(drawn<TestType>(n, random));
    for (const auto& values : gradients) sources.push_back(values.data());
    if (ranks == 5) sources[3] = nullptr;
    std::vector<TestType> expected(n);
    std::vector<double> expected_partials(num_tiles(n));
    void* destination = expected.data();
    tree_reduce(dtype_of<TestType>(), Reduction::sum, sources.data(), ranks, &destination, 1, n);
    const StatsSegment stats{expected.data(), expected_partials.data(), n, dtype_of<TestType>()};
    grad_stats(&stats, 1);

    INFO(n << " elements of " << ranks << " ranks");
    std::vector<TestType> elsewhere(n);
    for (TestType* const sum : {elsewhere.data(), gradients[0].data()}) {  // last in place, as an arena has it
      std::vector<double> partials(num_tiles(n));
      const ReduceSegment segment{sources.data(), sum, partials.data(), n};
      reduce_stats(dtype_of<TestType>(), ranks, &segment, 1);
      CHECK(partials == expected_partials);
    }
    CHECK(same_values(elsewhere, expected));
    CHECK(same_values(gradients[0], expected));
  }
}

TEMPLATE_TEST_CASE("reduce_stats multiplies gradients as pack does", "[kernels]", float, double) {
  const int ranks = GENERATE(1, 2, 3, 4, 5);
  std::mt19937_64 random(4);
  std::vector<size_t> sizes(std::begin(kSizes), std::end(kSizes));
  sizes.push_back(kStreamedSize);
  for (const size_t n : sizes) {
    std::vector<std::vector<TestType>> gradients;
    std::vector<std::vector<TestType>> packed;
    std::vector<const void*> sources;
    std::vector<const void*> packed_sources;
    std::vector<double> factors;
    for (int r = 0; r < ranks; ++r) {
      gradients.push_back(drawn<TestType>(n, random));
      packed.emplace_back(n);
      factors.push_back(r % 2 == 0 ? 0.3 + r : 1);
      const PackItem item{gradients.back().data(), dtype_of<TestType>(), packed.back().data(), n};
      pack(&item, 1, /*accumulate=*/false, factors.back());
    }
    for (const auto& values : gradients) sources.push_back(values.data());
    for (const auto& values : packed) packed_sources.push_back(values.data());
    std::vector<TestType> expected(n);
    std::vector<double> expected_partials(num_tiles(n));
    const ReduceSegment plain{packed_sources.data(), expected.data(), expected_partials.data(), n};
    reduce_stats(dtype_of<TestType>(), ranks, &plain, 1);

    INFO(n << " elements of " << ranks << " ranks");
    std::vector<TestType> elsewhere(n);
    for (TestType* const sum : {elsewhere.data(), gradients[0].data()}) {  // last in place
      std::vector<double> partials(num_tiles(n));
      const ReduceSegment segment{sources.data(), sum, partials.data(), n, factors.data()};
      reduce_stats(dtype_of<TestType>(), ranks, &segment, 1);
      CHECK(partials == expected_partials);
    }
    CHECK(same_values(elsewhere, expected));
    CHECK(same_values(gradients[0], expected));
  }
}

TEMPLATE_TEST_CASE("a step with copies is the step, copied", "[kernels]", float, double) {
  const bool has_low = GENERATE(false, true);
  const bool finite = GENERATE(true, false);
  const StepScalars scalars{3, 0.5, 1, 1, finite ? 1 : 0, 0};
  std::vector<size_t> sizes(std::begin(kSizes), std::end(kSizes));
  sizes.push_back(kStreamedSize);
  for (const size_t n : sizes) {
    std::mt19937_64 random(2);
    Stepped<TestType> whole(n, random);
    auto pieces = whole;
    std::vector<std::vector<TestType>> wide(3, std::vector<TestType>(n));
    std::vector<std::vector<uint16_t>> narrow(3, std::vector<uint16_t>(n));
    const auto segment = pieces.segment(has_low);
    std::vector<ptrdiff_t> displacements;
    for (size_t d = 0; d < 3; ++d) {
      const auto* const own = static_cast<std::byte*>(has_low ? segment.low : segment.parameter);
      const void* const other = has_low ? static_cast<void*>(narrow[d].data()) : static_cast<void*>(wide[d].data());
      displacements.push_back(static_cast<const std::byte*>(other) - own);
    }
    const auto expected = whole.segment(has_low);
    adam_step({dtype_of<TestType>(), &expected, 1, &scalars, true}, &kAdam);
    const StepCopies copies{displacements.data(), 3};
    adam_step_with_copies({dtype_of<TestType>(), &segment, 1, &scalars, true}, &kAdam, copies);
    INFO(n << " elements");
    CHECK(same_values(pieces.value, whole.value));
    CHECK(same_values(pieces.moment, whole.moment));
    CHECK(same_values(pieces.variance, whole.variance));
    CHECK(same_values(pieces.gradient, whole.gradient));
    CHECK(pieces.low == whole.low);
    for (size_t d = 0; d < 3; ++d) {
      if (has_low) {
        CHECK(narrow[d] == whole.low);
      } else {
        CHECK(same_values(wide[d], whole.value));
      }
    }
  }
}
