// The thread that gives this process's signs of life.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>

#include "net/unix_socket.h"
#include "server/worker/pulse.h"

namespace muster::server {

/// One for all pulses, begun with the first and ended with the last. Thread-safe.
class Heart {
 public:
  /// This process's: a forked child has one of its own, without its parent's pulses. Never destroyed.
  static Heart& of_process();

  /// As Surroundings.
  void start(Pulse& pulse);
  void stop(Pulse& pulse) noexcept;

 private:
  struct Kept {
    Pulse::TimePoint due;
    int descriptor = -1;
    bool is_readable = false;
  };

  explicit Heart(Heart* parent);
  void wake() noexcept;
  void beat() noexcept;
  void tick_some(std::unique_lock<std::mutex>& lock) noexcept;
  void wait(std::unique_lock<std::mutex>& lock) noexcept;

  const pid_t process_;
  [[maybe_unused]] Heart* const parent_;  // of the process that this one was forked from, or null: keeps it reachable
  const net::FileDescriptor awakening_;
  std::mutex lifecycle_mutex_;  // held while the thread is begun or ended; taken before mutex_
  std::thread thread_;          // guarded by lifecycle_mutex_
  std::mutex mutex_;
  std::condition_variable ticked_;
  std::map<Pulse*, Kept> pulses_;   // guarded by mutex_
  const Pulse* ticking_ = nullptr;  // likewise
};

}  // namespace muster::server
