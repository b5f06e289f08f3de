// Events of one device that are used again.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "comm/nccl/api.h"

namespace muster::comm::nccl {

using EventPtr = std::shared_ptr<void>;  ///< an Event; goes back to its pool

/// Thread-safe. Lives until its events are back. Its functions are called with the device current.
class EventPool : public std::enable_shared_from_this<EventPool> {
 public:
  explicit EventPool(DeviceApi device) : device_(std::move(device)) {}
  ~EventPool() {
    for (const Event event : free_) device_.destroy_event(event);
  }
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  EventPtr take() {
    Event event = nullptr;
    {
      const std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        event = free_.back();
        free_.pop_back();
      }
    }
    if (event == nullptr) event = device_.create_event();
    return EventPtr(event, [pool = shared_from_this()](Event returned) {
      const std::lock_guard lock(pool->mutex_);
      pool->free_.push_back(returned);
    });
  }

 private:
  const DeviceApi device_;
  std::mutex mutex_;
  std::vector<Event> free_;  // guarded by mutex_
};

}  // namespace muster::comm::nccl
