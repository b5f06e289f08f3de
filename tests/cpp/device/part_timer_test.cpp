#include "device/part_timer.h"

#include <chrono>
#include <thread>

#include "cpp/catch.h"

using namespace muster;

TEST_CASE("a part's time lies between starts and stops", "[part_timer]") {
  using Clock = std::chrono::steady_clock;
  const auto sleep = [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); };
  PartTimer timer(c10::kCPU);
  CHECK(timer.is_known());
  CHECK(timer.seconds() == 0);
  const auto begin = Clock::now();
  timer.start();
  sleep();
  timer.stop();
  sleep();
  timer.start();
  sleep();
  timer.stop();
  const double whole = std::chrono::duration<double>(Clock::now() - begin).count();
  CHECK(timer.is_known());
  CHECK(timer.seconds() >= 0.04);
  CHECK(timer.seconds() <= whole - 0.02);
}
