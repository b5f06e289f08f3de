#include "core/wait_hook.h"

#include <utility>

namespace muster {

namespace {
thread_local const WaitHook* innermost = nullptr;
}  // namespace

WaitHook::WaitHook(std::function<void()> hook) : hook_(std::move(hook)), outer_(std::exchange(innermost, this)) {}

WaitHook::~WaitHook() { innermost = outer_; }

void WaitHook::call() {
  if (innermost != nullptr && innermost->hook_) innermost->hook_();
}

}  // namespace muster
