#include "server/push_log.h"

#include <cstring>

#include "cpp/catch.h"

using namespace muster;
using namespace muster::server;

namespace {

constexpr uint64_t kBound = uint64_t{1} << 20;

}  // namespace

TEST_CASE("rows count against a log's bound, but for two steps", "[server]") {
  PushLog log({}, nullptr, kBound);
  for (const uint64_t step : {1U, 2U}) {
    auto* const entry = log.open(step);
    REQUIRE(entry != nullptr);
    REQUIRE(log.room(*entry, 3 * kBound) != nullptr);
  }
  CHECK(log.is_half_full());
  CHECK(log.open(3) == nullptr);
  log.release(1);
  REQUIRE(log.open(3) != nullptr);
  log.release(3);
  CHECK_FALSE(log.is_half_full());

  for (uint64_t step = 4; step < 7; ++step) {
    auto* const entry = log.open(step);
    REQUIRE(entry != nullptr);
    CHECK(log.room(*entry, 100) != nullptr);
  }
  CHECK(log.room(*log.find(6), kBound / 2) == nullptr);
  log.release(4);
  CHECK(log.room(*log.find(6), kBound / 2) != nullptr);
}

TEST_CASE("a log's rows do not overlap, and stay until they are released", "[server]") {
  PushLog log({}, nullptr, 4 * kBound);
  std::vector<std::pair<std::byte*, size_t>> places;
  for (uint64_t step = 1; step <= 3; ++step) {
    auto* const entry = log.open(step);
    REQUIRE(entry != nullptr);
    for (const size_t bytes : {100UL, 300'000UL, 64UL, 200'000UL, 1UL}) {
      auto* const place = log.room(*entry, bytes);
      REQUIRE(place != nullptr);
      CHECK(reinterpret_cast<uintptr_t>(place) % 64 == 0);
      std::memset(place, static_cast<int>(places.size()), bytes);
      places.emplace_back(place, bytes);
    }
  }
  for (size_t i = 0; i < places.size(); ++i) {
    CHECK(places[i].first[0] == std::byte(i));
    CHECK(places[i].first[places[i].second - 1] == std::byte(i));
  }
}
