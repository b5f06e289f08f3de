// Waiting for what may change without a lock of the one who waits.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "server/protocol/protocol.h"
#include "server/shard/timekeeper.h"

namespace muster::server {

/// An event count (Reed and Kanodia, "Synchronization with Eventcounts and Sequencers", 1979). Who waits reads the
/// count, looks whether what it waits for is there, and else waits for the count to grow: no event between is lost,
/// though who notifies holds no other lock. Thread-safe.
class EventCount {
 public:
  uint64_t count() const {
    const std::lock_guard lock(mutex_);
    return count_;
  }

  /// Call it after the change.
  void notify_all() {
    {
      const std::lock_guard lock(mutex_);
      ++count_;
    }
    changed_.notify_all();
  }

  /// Until the count is above `seen`; false at the deadline.
  bool wait_beyond(uint64_t seen, Deadline deadline, Timekeeper& time) {
    std::unique_lock lock(mutex_);
    return time.wait_until(lock, changed_, deadline, [&] { return count_ > seen; });
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t count_ = 0;  // guarded by mutex_
};

}  // namespace muster::server
