// The count of skipped windows where only the device knows whether a window was skipped.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "device/device.h"
#include "window/device_numbers.h"

namespace muster {

/// Counts windows in a row that were skipped, without waiting for the device: look() counts the windows whose end the
/// device has passed. A dropped window neither counts nor ends the row. Owned by the thread that steps.
class SkipWatch {
 public:
  /// Windows under way that have memory from the start; more take theirs when they come.
  static constexpr size_t kWindows = 64;

  /// `device`: that of the reports.
  explicit SkipWatch(c10::Device device);

  /// Adds a window that was closed. `step` and `non_finite_at` go into NonFinite's message if it was skipped.
  void note(const DeviceReport& report, int64_t step, std::string non_finite_at);

  /// Counts the noted windows that the device has ended. Does not block.
  void look();

  int in_a_row() const noexcept { return in_a_row_; }
  /// The step of the last window that was found skipped, and the last place that one named.
  int64_t step() const noexcept { return step_; }
  const std::string& non_finite_at() const noexcept { return non_finite_at_; }

 private:
  struct Flags {
    at::Tensor memory;  // skipped, dropped; on the host
    StreamPoint copied;
  };
  struct Window {
    Flags flags;
    int64_t step;
    std::string non_finite_at;
  };

  void add_memory();

  c10::Device device_;
  std::deque<Window> windows_;
  std::vector<Flags> free_;
  int in_a_row_ = 0;
  int64_t step_ = 0;
  std::string non_finite_at_;
};

}  // namespace muster
