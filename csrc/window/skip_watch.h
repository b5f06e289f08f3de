// The count of skipped windows where only the device knows whether a window was skipped.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <string>

#include "device/device.h"
#include "window/device_numbers.h"

namespace muster {

/// Counts windows in a row that were skipped, without waiting for the device: look() counts the windows whose end the
/// device has passed. A dropped window neither counts nor ends the row. Owned by the thread that steps.
class SkipWatch {
 public:
  /// Adds a window that was closed. `step` and `non_finite_at` go into NonFinite's message if it was skipped.
  void note(const DeviceReport& report, int64_t step, std::string non_finite_at);

  /// Counts the noted windows that the device has ended. Does not block.
  void look();

  int in_a_row() const noexcept { return in_a_row_; }
  /// The step of the last window that was found skipped, and the last place that one named.
  int64_t step() const noexcept { return step_; }
  const std::string& non_finite_at() const noexcept { return non_finite_at_; }

 private:
  struct Window {
    at::Tensor flags;  // skipped, dropped
    StreamPoint copied;
    int64_t step;
    std::string non_finite_at;
  };

  std::deque<Window> windows_;
  at::Tensor free_;  // host memory for a window's flags
  int in_a_row_ = 0;
  int64_t step_ = 0;
  std::string non_finite_at_;
};

}  // namespace muster
