#pragma once

#include <chrono>
#include <functional>
#include <thread>

namespace muster::testing {

/// Whether the condition holds within 20 s; it is asked every millisecond.
inline bool eventually(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace muster::testing
