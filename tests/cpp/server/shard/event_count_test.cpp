#include "server/shard/event_count.h"

#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

#include "cpp/catch.h"
#include "muster/error.h"
#include "server/shard/pushes.h"

using namespace muster;
using namespace muster::server;

namespace {

Deadline in(int ms) { return std::chrono::steady_clock::now() + std::chrono::milliseconds(ms); }

}  // namespace

TEST_CASE("who waits for events misses none, though nobody who notifies holds a lock", "[server]") {
  constexpr int kRounds = 20'000;
  EventCount events;
  Timekeeper time;
  std::atomic<int> ball{0};  // even: this thread's turn
  const auto play = [&](int parity) {
    for (int round = parity; round < kRounds; round += 2) {
      for (;;) {
        const uint64_t seen = events.count();
        if (ball == round) break;
        if (!events.wait_beyond(seen, in(30'000), time)) return false;
      }
      ball = round + 1;
      events.notify_all();
    }
    return true;
  };
  bool other = false;
  std::thread thread([&] { other = play(1); });
  CHECK(play(0));
  thread.join();
  CHECK(other);
  const uint64_t seen = events.count();
  CHECK_FALSE(events.wait_beyond(seen, in(1), time));
  CHECK(events.wait_beyond(seen - 1, in(0), time));
}

TEST_CASE("a step that waits for a push hears that nobody may push it, though it has just looked", "[server]") {
  Pushes* waiting = nullptr;
  int looks = 0;
  Timekeeper time;
  const auto may_push = [&](std::optional<uint32_t>, uint64_t) {
    if (looks++ > 0) return false;
    waiting->wake();  // as another thread would, which knows better
    return true;
  };
  Steps rules(true, may_push, time);
  Pushes pushes(rules);
  waiting = &pushes;
  auto lock = pushes.lock();
  CHECK_THROWS_AS(pushes.wait_for_pushes(lock, 1, {0}, in(10'000)), CheckpointError);
  CHECK(looks == 2);
}

TEST_CASE("who asks how far a chunk is, or has news for it, does not wait for its step", "[server]") {
  const bool is_synchronous = GENERATE(false, true);
  Timekeeper time;
  Steps rules(is_synchronous, [](std::optional<uint32_t>, uint64_t) { return true; }, time);
  Pushes pushes(rules);
  pushes.restore({7, {2}, {1}, {5}});
  auto lock = pushes.lock();
  std::atomic<bool> is_done{false};
  std::thread other([&] {
    pushes.wake();
    if (pushes.step_of(2, 1) == (is_synchronous ? 7 : 5) && pushes.steps() == 7) is_done = true;
  });
  const auto end = in(10'000);
  while (!is_done && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  CHECK(is_done);
  lock.unlock();
  other.join();
}
