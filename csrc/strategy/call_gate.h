// A gate of a strategy's calls: who is inside them, so that its end can wait for them.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace muster {

/// Calls of a strategy enter it; close() shuts it, once all have left. Thread-safe. No lock is held while a call runs.
class CallGate {
 public:
  /// One thread's stay; ends with it. Movable.
  class Pass {
   public:
    explicit Pass(CallGate& gate) noexcept : gate_(&gate) {}
    Pass(Pass&& other) noexcept;
    Pass& operator=(Pass&&) = delete;
    ~Pass();

   private:
    CallGate* gate_;
    bool is_alone_ = false;
    friend class CallGate;
  };

  CallGate();

  /// Throws InvalidArgument once the gate is being shut.
  Pass enter();
  /// Likewise, and where another thread is in a call that entered so; `what` names the call. The same thread may.
  Pass enter_alone(const char* what);

  /// Whether anybody is in a call.
  bool is_occupied() const;
  /// Whether it is being shut, or is shut.
  bool is_shut() const noexcept { return shut_; }
  /// From here on nobody enters. Does not wait.
  void shut() noexcept { shut_ = true; }

  /// Shuts the gate, waits until everybody has left, and then calls `last`, once and for one caller; others wait for
  /// it. `poll` is called about ten times a second meanwhile; what it or `last` throws ends this wait alone, and the
  /// next caller goes on. Throws InvalidArgument where the calling thread is inside. In a forked child, which has none
  /// of the threads, it does not wait.
  void close(const std::function<void()>& last, const std::function<void()>& poll = {});

 private:
  void leave(bool was_alone) noexcept;
  void check_open() const;
  bool is_inside() const;

  const pid_t process_;
  std::atomic<bool> shut_{false};
  mutable std::mutex mutex_;
  std::condition_variable left_;
  std::vector<std::thread::id> inside_;  // guarded by mutex_; a thread once for each of its calls
  std::thread::id alone_;                // guarded by mutex_
  int alone_depth_ = 0;                  // guarded by mutex_
  bool is_closing_ = false;              // guarded by mutex_: somebody is in close()'s `last`
  bool is_closed_ = false;               // guarded by mutex_
};

}  // namespace muster
