// SIGTERM, which launchers send before they kill, as a request to stop.
#pragma once

#include <sys/types.h>

namespace muster {

/// While one lives, SIGTERM is taken for stop(), where it had its default action: it is counted as received, a line on
/// stderr says so, and a second one has the default action again. Where training goes on without a look at `stopping`
/// (see note_step), SIGTERM ends the process as by default. With the last one the default action comes back. Forked
/// children have it from the start. Thread-safe.
class SigtermWatch {
 public:
  SigtermWatch();
  ~SigtermWatch();
  SigtermWatch(const SigtermWatch&) = delete;
  SigtermWatch& operator=(const SigtermWatch&) = delete;

  /// Before the end of its life. Idempotent.
  void end() noexcept;

  /// Whether this process, not a parent of it, got one.
  static bool received() noexcept;

  /// Somebody looked at `stopping`.
  static void note_look() noexcept;

  /// A step begins after a window was closed, gradients of a backward by hand are averaged, or there is a strategy that
  /// has no `stopping`. Where nobody has looked at `stopping` since the first watch, SIGTERM has its default action
  /// until somebody does, and one that was received ends the process.
  static void note_step() noexcept;

  /// There is a strategy that has no `stopping`: as note_step(), and no line on stderr tells of it.
  static void let_end() noexcept;

 private:
  const pid_t process_;
  bool lives_ = true;
};

}  // namespace muster
