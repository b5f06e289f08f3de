#include "kernels/norm_sum.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "cpp/catch.h"
#include "cpp/kernels/support.h"

using namespace muster::kernels;
using namespace muster::kernels::testing;

namespace {

constexpr double kLeast = std::numeric_limits<double>::denorm_min();
constexpr double kGreatest = std::numeric_limits<double>::max();

NormSum sum_of(const std::vector<double>& partials, double norm_type = 2) {
  NormSum sum;
  for (const double partial : partials) add_partial(sum, partial, norm_type);
  return sum;
}

double total_of(const std::vector<double>& partials, double norm_type = 2) {
  return norm_total(sum_of(partials, norm_type));
}

// Of all sizes, subnormal ones and zeros among them.
std::vector<double> some_partials(std::mt19937_64& random, int least_exponent, int greatest_exponent) {
  std::vector<double> partials(random() % 300);
  const auto range = static_cast<uint64_t>(greatest_exponent - least_exponent + 1);
  for (double& partial : partials) {
    partial = std::ldexp(static_cast<double>(random() >> 11), static_cast<int>(random() % range) + least_exponent);
    if (random() % 8 == 0) partial = 0;
  }
  return partials;
}

}  // namespace

TEST_CASE("the total of a norm's partials is their sum, rounded once to nearest even", "[kernels]") {
  std::mt19937_64 random(1);
  for (int round = 0; round < 3000; ++round) {
    unsigned __int128 exact = 0;
    const int scale = static_cast<int>(random() % 1900) - 1074;  // the largest sums overflow no double
    std::vector<double> partials(random() % 300);
    for (double& partial : partials) {
      const uint64_t whole = random() >> (11 + random() % 53);
      const auto shift = random() % 40;
      partial = std::ldexp(static_cast<double>(whole), scale + static_cast<int>(shift));
      exact += static_cast<unsigned __int128>(whole) << shift;
    }
    INFO("round " << round);
    REQUIRE(total_of(partials) == std::ldexp(static_cast<double>(exact), scale));
  }
  CHECK(total_of({}) == 0);
  CHECK(total_of({0, 0}) == 0);
  CHECK(total_of({1, 0x1p-53}) == 1);
  CHECK(total_of({1 + 0x1p-52, 0x1p-53}) == 1 + 0x1p-51);
  CHECK(total_of({1, 0x1p-53, 0x1p-90}) == 1 + 0x1p-52);
  CHECK(total_of({kLeast}) == kLeast);
  CHECK(total_of({kLeast, 3 * kLeast}) == 4 * kLeast);
  CHECK(total_of({std::numeric_limits<double>::min(), kLeast}) == std::numeric_limits<double>::min() + kLeast);
  CHECK(total_of({kGreatest}) == kGreatest);
  CHECK(total_of({kGreatest, 1}) == kGreatest);
  CHECK(total_of({kGreatest, kGreatest}) == kInfinity);
  CHECK(total_of({kGreatest, std::ldexp(1.0, 970)}) == kInfinity);
  CHECK(total_of({kGreatest, std::ldexp(1.0, 969)}) == kGreatest);
}

TEST_CASE("the bits of a norm's sum depend on no order and no division", "[kernels]") {
  std::mt19937_64 random(2);
  for (const auto& [least, greatest] : std::vector<std::pair<int, int>>{{-1126, 918}, {-40, 40}, {-1126, -900}}) {
    for (int round = 0; round < 500; ++round) {
      auto partials = some_partials(random, least, greatest);
      const auto expected = sum_of(partials);
      std::shuffle(partials.begin(), partials.end(), random);
      std::vector<NormSum> shares(1 + random() % 5);
      for (const double partial : partials) add_partial(shares[random() % shares.size()], partial, 2);
      std::shuffle(shares.begin(), shares.end(), random);
      NormSum joined;
      for (const auto& share : shares) join_norm_sums(joined, share, 2);
      INFO("round " << round);
      REQUIRE(joined == expected);
    }
  }
}

TEST_CASE("a norm's sum keeps carries of many partials", "[kernels]") {
  const double partial = std::nextafter(2.0, 0.0);
  NormSum sum;
  for (int i = 0; i < 1 << 20; ++i) add_partial(sum, partial, 2);
  for (int i = 0; i < 10; ++i) join_norm_sums(sum, NormSum(sum), 2);
  CHECK(norm_total(sum) == std::ldexp(partial, 30));
}

TEST_CASE("what is not finite makes a norm's sum so, and the maximum norm has the largest partial", "[kernels]") {
  CHECK(total_of({1, kInfinity, 2}) == kInfinity);
  CHECK(std::isnan(total_of({1, kNaN, 2})));
  CHECK(std::isnan(total_of({kInfinity, 1, kNaN})));
  CHECK(std::isnan(total_of({kNaN, kInfinity})));
  NormSum joined = sum_of({1});
  join_norm_sums(joined, sum_of({kInfinity}), 2);
  CHECK(norm_total(joined) == kInfinity);
  CHECK(total_of({1, 5, 3}, kInfinity) == 5);
  CHECK(total_of({}, kInfinity) == 0);
  CHECK(total_of({1, kInfinity}, kInfinity) == kInfinity);
  CHECK(std::isnan(total_of({1, kNaN, 3}, kInfinity)));
  NormSum largest = sum_of({1, 2}, kInfinity);
  join_norm_sums(largest, sum_of({7}, kInfinity), kInfinity);
  CHECK(norm_total(largest) == 7);
}
