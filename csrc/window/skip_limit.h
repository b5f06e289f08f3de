// Windows in a row whose gradient was not finite, and the limit at which training ends.
#pragma once

#include <cstdint>
#include <string>

#include "window/outcome.h"
#include "window/skip_watch.h"

namespace muster {

/// Owned by the thread that steps.
class SkipLimit {
 public:
  /// `max_skipped`: windows in a row that end training. `device`: that of the first replica.
  SkipLimit(int max_skipped, c10::Device device) : max_skipped_(max_skipped), watch_(device) {}

  /// A window was closed, which was not dropped; `step` is its number. On a device those count whose end it has passed.
  void note(const WindowSums& sums, int64_t step);

  /// Whether the next window is to be searched for the first gradient that is not finite. Looking waits for a device:
  /// only when it is nearly time to say where.
  bool searches() const noexcept { return searches_; }

  /// Throws NonFinite where the limit is reached.
  void check() const;

 private:
  const int max_skipped_;
  int in_a_row_ = 0;
  int64_t last_step_ = 0;
  std::string where_;  // in the last window that was skipped; may be empty
  bool searches_ = false;
  SkipWatch watch_;  // where replicas work on streams
};

}  // namespace muster
