// Waiting for operations that one thread issued for several ranks. Header-only.
#pragma once

#include <chrono>
#include <thread>
#include <vector>

#include "comm/work.h"

namespace muster::comm {

/// Waits for the operation of each of a process's ranks, all of which the calling thread issued, on the host or on
/// `device`. Through the host a rank does its part only while it is asked after, and so they are asked in turn; an
/// operation that takes longer than that usually does is waited for by itself, which throws as Work::wait.
inline void wait_all(std::vector<Work>& works, c10::Device device) {
  constexpr auto kInTurn = std::chrono::seconds(20);
  const auto deadline = std::chrono::steady_clock::now() + kInTurn;
  for (bool all_done = !device.is_cpu(); !all_done && std::chrono::steady_clock::now() < deadline;) {
    all_done = true;
    for (auto& work : works) all_done = work.done() && all_done;
    if (!all_done) std::this_thread::yield();
  }
  for (auto& work : works) work.wait();
}

}  // namespace muster::comm
