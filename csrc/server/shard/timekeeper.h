// The time, and waits for others, as a server's logic sees them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace muster::server {

/// The real one; tests derive others. Thread-safe.
class Timekeeper {
 public:
  using Time = std::chrono::steady_clock::time_point;

  Timekeeper() = default;
  virtual ~Timekeeper() = default;
  Timekeeper(const Timekeeper&) = delete;
  Timekeeper& operator=(const Timekeeper&) = delete;

  virtual Time now() const { return std::chrono::steady_clock::now(); }

  /// Waits until `changed` is notified; false at the deadline. Where a request must not wait, as in a server without
  /// threads, this throws, and the request is given again later: up to here it may be repeated.
  virtual bool wait(std::unique_lock<std::mutex>& lock, std::condition_variable& changed, Time deadline) {
    return changed.wait_until(lock, deadline) == std::cv_status::no_timeout;
  }

  /// The same until `ready()`; returns it.
  template <class Ready>
  bool wait_until(std::unique_lock<std::mutex>& lock, std::condition_variable& changed, Time deadline,
                  const Ready& ready) {
    while (!ready()) {
      if (now() >= deadline || (!wait(lock, changed, deadline) && !ready())) return ready();
    }
    return true;
  }
};

}  // namespace muster::server
