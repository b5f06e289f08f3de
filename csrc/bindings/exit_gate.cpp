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

thread_local int depth = 0;  // visits of this thread

// Of its parent's threads a forked child has the one that forked.
[[maybe_unused]] const int kForkHandler = ::pthread_atfork(nullptr, nullptr, [] { inside = depth; });

}  // namespace

ExitGate::Visit::Visit() noexcept {
  ++inside;
  is_inside_ = !is_closed;
  if (is_inside_) {
    ++depth;
  } else {
    --inside;
  }
}

ExitGate::Visit::~Visit() {
  if (!is_inside_) return;
  --depth;
  --inside;
}

void ExitGate::close() noexcept {
  is_closed = true;
  const auto deadline = std::chrono::steady_clock::now() + kPatienceAtExit;
  while (inside > 0 && std::chrono::steady_clock::now() < deadline) std::this_thread::sleep_for(kLookAtExit);
}

}  // namespace muster
