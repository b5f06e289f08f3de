#include "bindings/exit_gate.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace muster {

namespace {

constexpr std::chrono::seconds kPatienceAtExit{5};
constexpr std::chrono::milliseconds kLookAtExit{1};

std::atomic<bool> is_closed{false};
std::atomic<int> inside{0};

// Those of the parent's threads are not in a forked child.
[[maybe_unused]] const int registered = ::pthread_atfork(nullptr, nullptr, [] { inside = 0; });

}  // namespace

ExitGate::Visit::Visit() noexcept {
  ++inside;
  is_inside_ = !is_closed;
  if (!is_inside_) --inside;
}

ExitGate::Visit::~Visit() {
  if (is_inside_) --inside;
}

void ExitGate::close() noexcept {
  is_closed = true;
  const auto deadline = std::chrono::steady_clock::now() + kPatienceAtExit;
  while (inside > 0 && std::chrono::steady_clock::now() < deadline) std::this_thread::sleep_for(kLookAtExit);
}

}  // namespace muster
