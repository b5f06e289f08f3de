// A hook that a thread calls while it waits inside the library: for signals, in Python.
#pragma once

#include <functional>

namespace muster {

/// While it lives, waits of the calling thread for other ranks call `hook` every 50 ms or so. What the hook throws ends
/// the wait: it is rethrown there, and the group that was waited on fails on all ranks. Hooks nest, the innermost is
/// called; an empty one hides the others. Owned by one thread.
class WaitHook {
 public:
  explicit WaitHook(std::function<void()> hook);
  ~WaitHook();
  WaitHook(const WaitHook&) = delete;
  WaitHook& operator=(const WaitHook&) = delete;

  /// Calls the calling thread's hook, if there is one.
  static void call();

 private:
  std::function<void()> hook_;
  const WaitHook* outer_;
};

}  // namespace muster
