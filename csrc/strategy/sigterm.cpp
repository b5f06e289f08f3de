#include <atomic>
#include <csignal>
#include <mutex>

#include "strategy/strategy_core.h"

namespace muster {

namespace {

std::atomic<bool> received{false};
static_assert(std::atomic<bool>::is_always_lock_free, "a signal handler writes it");

extern "C" void on_sigterm(int signal) {
  received.store(true, std::memory_order_relaxed);
  std::signal(signal, SIG_DFL);
}

}  // namespace

void watch_sigterm() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction current{};
    if (sigaction(SIGTERM, nullptr, &current) == 0 && current.sa_handler == SIG_DFL) {
      std::signal(SIGTERM, on_sigterm);
    }
  });
}

bool sigterm_received() noexcept { return received.load(std::memory_order_relaxed); }

}  // namespace muster
