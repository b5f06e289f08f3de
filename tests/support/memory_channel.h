// Channels between two ends in this process, without sockets: deterministic where the waiting is.
#pragma once

#include <functional>
#include <memory>
#include <mutex>

#include "net/channel.h"

namespace muster::testing {

/// How the ends of memory channels wait for one another; simulations give their own. Thread-safe.
class Waiting {
 public:
  virtual ~Waiting() = default;
  /// What deadlines are compared with.
  virtual net::Deadline now() = 0;
  /// Waits until `is_ready()`, which is called with `lock` held, or the deadline; returns what it says then. A deadline
  /// that has passed waits for nothing. `lock` is released meanwhile.
  virtual bool wait(std::unique_lock<std::mutex>& lock, net::Deadline deadline,
                    const std::function<bool()>& is_ready) = 0;
  /// Something changed that may make others ready. Called with the lock held.
  virtual void notify() = 0;
};

struct MemoryEnds {
  std::unique_ptr<net::Channel> caller;
  std::unique_ptr<net::Channel> callee;
};

/// Frames travel as the bytes of a stream that holds 256 KiB each way; what is up to 4 KiB goes whole or not at all.
/// Nothing is shared. `waiting`: null for threads and the system's clock.
MemoryEnds connect_in_memory(std::shared_ptr<Waiting> waiting = nullptr);

}  // namespace muster::testing
