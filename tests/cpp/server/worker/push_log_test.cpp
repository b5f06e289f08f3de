#include "server/worker/push_log.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "cpp/catch.h"
#include "muster/error.h"

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
    CHECK(log.room(*entry, kBound / 4) != nullptr);
  }
  CHECK(log.room(*log.find(6), kBound / 2) == nullptr);
  log.release(4);
  CHECK(log.room(*log.find(6), kBound / 2) != nullptr);
}

TEST_CASE("a step that has begun may go beyond a log's bound, and the next one may not", "[server]") {
  PushLog log({}, nullptr, kBound);
  for (uint64_t step = 1; step <= 3; ++step) REQUIRE(log.room(*log.open(step), 1000) != nullptr);
  CHECK_FALSE(log.is_full());
  CHECK(log.room(*log.find(3), 2 * kBound) == nullptr);
  CHECK(log.room(*log.find(3), 2 * kBound, /*beyond_bound=*/true) != nullptr);
  CHECK(log.is_full());
  CHECK(log.open(4) == nullptr);
  log.release(3);
  CHECK(log.open(4) != nullptr);
}

TEST_CASE("a step beyond a log's bound gives its memory back", "[server]") {
  std::vector<Chunk> chunks(1);
  chunks.front().numel = kBound / sizeof(float);
  const auto arena = std::make_shared<net::Arena>(PushLog::memory_needed(chunks, 0));
  PushLog log(chunks, arena, 0);
  for (int round = 0; round < 3; ++round) {
    const uint64_t first = log.first_step_after();
    REQUIRE(log.open(first) != nullptr);
    REQUIRE(log.open(first + 1) != nullptr);
    CHECK(log.is_full());
    CHECK(log.open(first + 2) == nullptr);
    auto* const entry = log.open(first + 2, /*beyond_bound=*/true);
    REQUIRE(entry != nullptr);
    CHECK(entry == log.find(first + 2));
    CHECK(log.is_full());
    log.release(first + 2);
    std::byte* const rest[] = {arena->allocate(kBound), arena->allocate(kBound)};  // all that two steps leave
    for (std::byte* const memory : rest) arena->release(memory);
  }
}

TEST_CASE("small parts of a step of rows leave little of a log's bound unused", "[server]") {
  constexpr uint64_t kSome = 10 * kBound;
  constexpr uint64_t kPart = 16'500;
  PushLog log({}, nullptr, kSome);
  uint64_t kept = 0;
  for (uint64_t step = 1;; ++step) {
    auto* const entry = log.open(step);
    REQUIRE(entry != nullptr);
    int parts = 0;
    while (parts < 16 && log.room(*entry, kPart) != nullptr) ++parts;
    if (parts < 16) break;
    kept += 16 * kPart;
  }
  CHECK(8 * kept >= 5 * kSome);
}

TEST_CASE("a log takes a chunk in pieces, exactly as long as it is", "[server]") {
  // Of the sizes of a small model, and of one whose pushes leave no room in a cache.
  for (const int64_t numel : {40L, 3'000'017L}) {
    std::vector<Chunk> chunks(2);
    for (auto& chunk : chunks) chunk.numel = numel;
    PushLog log(chunks, nullptr, kBound);
    auto* const entry = log.open(1);
    REQUIRE(entry != nullptr);
    std::vector<std::byte> values(static_cast<size_t>(chunks[1].gradient_bytes()) + 1);
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<std::byte>(i * 2654435761U >> 13);
    const Bytes all(values);
    const Bytes pieces[] = {all.subspan(0, 7), all.subspan(7, 30), all.subspan(37)};
    CHECK_THROWS_AS(log.write(*entry, 1, pieces), InvalidArgument);
    CHECK_THROWS_AS(log.write(*entry, 1, {pieces, 2}), InvalidArgument);
    CHECK_FALSE(entry->pushed[1]);
    const Bytes last = pieces[2].first(pieces[2].size() - 1);
    const Bytes exact[] = {pieces[0], pieces[1], last};
    log.write(*entry, 1, exact);
    CHECK(entry->pushed[1]);
    CHECK_FALSE(entry->pushed[0]);
    const Bytes written = log.of_chunk(*entry, 1);
    REQUIRE(written.size() + 1 == values.size());
    CHECK(std::equal(written.begin(), written.end(), values.begin()));
  }
}

TEST_CASE("a log copies what it was lent when it is asked to, and nothing that is released", "[server]") {
  std::vector<Chunk> chunks(2);
  for (auto& chunk : chunks) chunk.numel = 40;
  PushLog log(chunks, nullptr, kBound);
  const auto values = std::make_shared<std::vector<std::byte>>(static_cast<size_t>(chunks[0].gradient_bytes()));
  const Bytes all(*values);
  const Bytes pieces[] = {all.first(9), all.subspan(9)};
  CHECK_THROWS_AS(log.lend(*log.open(1), 0, {pieces, 1}, values), InvalidArgument);
  for (const uint64_t step : {1, 2, 3}) {
    auto* const entry = log.open(step);
    REQUIRE(entry != nullptr);
    log.lend(*entry, 1, pieces, values);
    CHECK(entry->pushed[1]);
    CHECK(values.use_count() == 2);
    if (step == 2) {
      std::fill(values->begin(), values->end(), std::byte{2});
      log.take_lent();
      CHECK(std::all_of(log.of_chunk(*entry, 1).begin(), log.of_chunk(*entry, 1).end(),
                        [](std::byte byte) { return byte == std::byte{2}; }));
    }
    log.release(step);
    CHECK(values.use_count() == 1);
  }
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
