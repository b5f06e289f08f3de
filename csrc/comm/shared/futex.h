// Sleeping on a 32-bit word, between threads or between processes that map it.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <ctime>

namespace muster::comm {

/// Sleeps while `word` is `expected`, at most `timeout`; may wake early.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, std::chrono::nanoseconds timeout,
                       bool crosses_processes) noexcept {
  const timespec limit{static_cast<time_t>(timeout.count() / 1'000'000'000),
                       static_cast<long>(timeout.count() % 1'000'000'000)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), crosses_processes ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, expected,
          &limit, nullptr, 0);
}

/// Wakes the sleepers on `word`.
inline void futex_wake(std::atomic<uint32_t>& word, bool crosses_processes) noexcept {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), crosses_processes ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, INT32_MAX,
          nullptr, nullptr, 0);
}

}  // namespace muster::comm
