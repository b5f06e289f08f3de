// From measured times to the sizes of parts. Times are given, not measured.
#include "data/balance.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <string>

#include "core/log.h"
#include "cpp/catch.h"
#include "muster/batch.h"

using namespace muster;
using muster::detail::part_sizes;

namespace {

using Sizes = std::vector<int64_t>;

int64_t total(const Sizes& sizes) { return std::accumulate(sizes.begin(), sizes.end(), int64_t{0}); }

double finish(const Sizes& sizes, const std::vector<double>& speeds) {
  double last = 0;
  for (size_t r = 0; r < sizes.size(); ++r) last = std::max(last, static_cast<double>(sizes[r]) / speeds[r]);
  return last;
}

// The earliest finish over all ways of dividing n samples.
double best_finish(int64_t n, const std::vector<double>& speeds, Sizes sizes = {}) {
  if (sizes.size() + 1 == speeds.size()) {
    sizes.push_back(n);
    return finish(sizes, speeds);
  }
  double best = std::numeric_limits<double>::infinity();
  for (int64_t size = 0; size <= n; ++size) {
    sizes.push_back(size);
    best = std::min(best, best_finish(n - size, speeds, sizes));
    sizes.pop_back();
  }
  return best;
}

std::vector<double> fractions(std::vector<double> speeds) {
  const double sum = std::accumulate(speeds.begin(), speeds.end(), 0.0);
  for (double& speed : speeds) speed /= sum;
  return speeds;
}

// Replicas that take fixed[r] + rows / speeds[r] seconds.
struct Replicas {
  std::vector<double> speeds;
  std::vector<double> fixed = std::vector<double>(speeds.size(), 0.0);
  double noise = 0;
  Balancer balancer{static_cast<int>(speeds.size())};
  std::mt19937 random{7};

  Sizes sizes(int64_t n) const { return part_sizes(n, static_cast<int>(speeds.size()), balancer.capacities()); }

  std::vector<double> seconds(const Sizes& rows) {
    std::normal_distribution<double> normal;
    std::vector<double> times;
    for (size_t r = 0; r < speeds.size(); ++r) {
      times.push_back((fixed[r] + static_cast<double>(rows[r]) / speeds[r]) * std::exp(noise * normal(random)));
    }
    return times;
  }

  bool step(const Sizes& rows) { return balancer.note(rows, seconds(rows)); }

  // Steps over batches of n; how often the capacities changed.
  int train(int64_t n, size_t steps) {
    int changes = 0;
    for (size_t i = 0; i < steps; ++i) changes += step(sizes(n)) ? 1 : 0;
    return changes;
  }
};

constexpr size_t kFirstLook = 1 + Balancer::kFirstWindow;

}  // namespace

TEST_CASE("sizes by equal capacities are the equal sizes", "[balance]") {
  for (int parts = 1; parts <= 16; ++parts) {
    const std::vector<double> equal(static_cast<size_t>(parts), 1.0 / parts);
    for (int64_t n = 0; n <= 130; ++n) CHECK(part_sizes(n, parts, equal) == part_sizes(n, parts));
  }
}

TEST_CASE("sizes by capacity let the last replica finish as early as can be", "[balance]") {
  const auto speeds = GENERATE(std::vector<double>{3, 1}, std::vector<double>{1, 3}, std::vector<double>{1, 1.3, 0.8},
                               std::vector<double>{5, 0.1, 2}, std::vector<double>{1, 10, 1, 7});
  const auto capacities = fractions(speeds);
  for (int64_t n = 0; n <= 14; ++n) {
    const auto sizes = part_sizes(n, static_cast<int>(speeds.size()), capacities);
    CAPTURE(n, sizes);
    CHECK(total(sizes) == n);
    CHECK(finish(sizes, speeds) == Approx(best_finish(n, speeds)));
  }
}

TEST_CASE("a replica gets no rows only where one would take as long as the largest part", "[balance]") {
  CHECK(part_sizes(8, 2, {0.75, 0.25}) == Sizes{6, 2});
  CHECK(part_sizes(1, 3, {0.2, 0.5, 0.3}) == Sizes{0, 1, 0});
  CHECK(part_sizes(2, 4, {0.1, 0.2, 0.3, 0.4}) == Sizes{0, 0, 1, 1});
  CHECK(part_sizes(9, 2, {0.9, 0.1}) == Sizes{9, 0});  // 1 / 0.1 is no less than 9 / 0.9
  CHECK(part_sizes(10, 2, {0.9, 0.1}) == Sizes{9, 1});
  CHECK(part_sizes(0, 2, {0.9, 0.1}) == Sizes{0, 0});
  const auto large = part_sizes(int64_t{1} << 40, 3, {0.5, 0.3, 0.2});
  CHECK(total(large) == int64_t{1} << 40);
}

TEST_CASE("after a step to warm up and a few equal ones, parts follow the speeds", "[balance]") {
  Replicas replicas{{300, 100}};
  CHECK(replicas.balancer.capacities() == std::vector<double>{0.5, 0.5});
  CHECK_FALSE(replicas.balancer.note({8, 8}, {100, 1}));  // the warm-up: as if replica 0 were the slow one
  CHECK(replicas.train(16, Balancer::kFirstWindow - 1) == 0);
  CHECK(replicas.sizes(16) == Sizes{8, 8});
  CHECK(replicas.train(16, 1) == 1);
  CHECK(replicas.balancer.capacities()[0] == Approx(0.75));
  CHECK(replicas.balancer.capacities()[1] == Approx(0.25));
  CHECK(replicas.sizes(16) == Sizes{12, 4});
  CHECK(replicas.train(16, 500) == 0);
}

TEST_CASE("a change is followed by a step to warm up", "[balance]") {
  Replicas replicas{{300, 100}};
  REQUIRE(replicas.train(16, kFirstLook) == 1);
  replicas.speeds = {100, 300};
  CHECK(replicas.train(16, 2 * Balancer::kFirstWindow) == 0);
  CHECK(replicas.train(16, 1) == 1);
}

TEST_CASE("one slow step does not count for much", "[balance]") {
  Replicas replicas{{100, 100}};
  for (size_t i = 0; i < kFirstLook; ++i) {
    CHECK_FALSE(replicas.balancer.note({8, 8}, {i == 3 ? 50.0 : 0.08, 0.08}));
  }
}

TEST_CASE("time that does not depend on the rows is balanced, too", "[balance]") {
  Replicas replicas{{1000, 100, 400}, {0.02, 0.05, 0.01}};
  replicas.train(128, 200);
  const auto sizes = replicas.sizes(128);
  CHECK(total(sizes) == 128);
  const auto times = replicas.seconds(sizes);
  const auto [first, last] = std::minmax_element(times.begin(), times.end());
  CAPTURE(sizes, times);
  CHECK(*last < 1.2 * *first);
  CHECK(*last < 0.7 * (0.05 + 43.0 / 100));
}

TEST_CASE("parts stay where less than a twentieth would be gained", "[balance]") {
  Replicas close{{1.04, 1}};
  CHECK(close.train(1000, 1000) == 0);
  Replicas apart{{1.2, 1}};
  CHECK(apart.train(1000, 1000) == 1);
  Replicas small{{1.5, 1}};  // 2 and 2 rows, or 3 and 1: no gain
  CHECK(small.train(4, 1000) == 0);
}

TEST_CASE("noise does not make parts jitter", "[balance]") {
  Replicas equal{{1, 1, 1, 1}};
  equal.noise = 0.15;
  CHECK(equal.train(1000, 5000) <= 2);
  Replicas different{{4, 1}};
  different.noise = 0.15;
  CHECK(different.train(1000, 5000) <= 3);
  CHECK(different.balancer.capacities()[0] == Approx(0.8).margin(0.03));
}

TEST_CASE("steps that were divided otherwise do not count", "[balance]") {
  Replicas replicas{{300, 100}};
  for (int i = 0; i < 50; ++i) {
    CHECK_FALSE(replicas.step({4, 12}));
    CHECK_FALSE(replicas.step({0, 0}));
    CHECK_FALSE(replicas.balancer.note({-1, -1}, {1, 3}));
  }
  CHECK(replicas.train(16, kFirstLook) == 1);
  // What was read ahead still has equal parts.
  for (int i = 0; i < 50; ++i) CHECK_FALSE(replicas.balancer.note({8, 8}, {3, 1}));
  CHECK(replicas.sizes(16) == Sizes{12, 4});
}

TEST_CASE("the short batch at an epoch's end does not count", "[balance]") {
  Balancer balancer(2);
  for (int i = 0; i < 100; ++i) {
    CHECK_FALSE(balancer.note({8, 8}, {1, 1}));
    CHECK_FALSE(balancer.note({1, 1}, {1, 9}));
  }
  // A loop whose batches are all that small is another matter.
  int changes = 0;
  for (size_t i = 0; i < 4 * Balancer::kLongestWindow; ++i) changes += balancer.note({1, 1}, {1, 9}) ? 1 : 0;
  CHECK(changes == 1);
}

TEST_CASE("speeds are looked at again as training goes on", "[balance]") {
  Replicas replicas{{100, 100}};
  CHECK(replicas.train(64, 1000) == 0);
  replicas.speeds = {100, 300};
  CHECK(replicas.train(64, 3 * Balancer::kLongestWindow) > 0);
  CHECK(replicas.sizes(64) == Sizes{16, 48});
  replicas.speeds = {100, 100};
  CHECK(replicas.train(64, 3 * Balancer::kLongestWindow) > 0);
  CHECK(replicas.sizes(64) == Sizes{32, 32});
}

TEST_CASE("fewer rows than replicas leave parts equal", "[balance]") {
  Replicas replicas{{1, 5, 9, 2}};
  CHECK(replicas.train(3, 500) == 0);
  CHECK(replicas.sizes(3) == Sizes{1, 1, 1, 0});
}

TEST_CASE("a replica without rows is tried again, ever more seldom", "[balance]") {
  Replicas replicas{{100, 1}};
  replicas.train(8, kFirstLook);
  REQUIRE(replicas.sizes(8) == Sizes{8, 0});
  size_t tried = 0;
  for (int i = 0; i < 20'000; ++i) {
    const auto sizes = replicas.sizes(8);
    tried += sizes[1] > 0 ? 1 : 0;
    replicas.step(sizes);
  }
  CHECK(tried > 0);
  CHECK(tried <= 8 * kFirstLook);
  replicas.speeds = {100, 100};
  replicas.train(8, 40'000);
  CHECK(replicas.sizes(8) == Sizes{4, 4});
  // Having come back, it is tried as soon as the first time.
  replicas.speeds = {100, 1};
  replicas.train(8, 2 * Balancer::kLongestWindow);
  REQUIRE(replicas.sizes(8) == Sizes{8, 0});
  replicas.speeds = {100, 100};
  replicas.train(8, 2 * Balancer::kFirstPatience + 2 * Balancer::kLongestWindow);
  CHECK(replicas.sizes(8) == Sizes{4, 4});
}

TEST_CASE("a change is logged, once", "[balance]") {
  std::vector<std::string> messages;
  set_log_sink([&](LogLevel level, const std::string& message) {
    if (level == LogLevel::info) messages.push_back(message);
  });
  Replicas replicas{{300, 100}};
  replicas.train(16, 300);
  set_log_sink({});
  REQUIRE(messages.size() == 1);
  CHECK_THAT(messages.front(), ContainsSubstring("0.75, 0.25"));
}
