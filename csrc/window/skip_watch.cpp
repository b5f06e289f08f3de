#include "window/skip_watch.h"

#include <utility>

namespace muster {

SkipWatch::SkipWatch(c10::Device device) : device_(device) { add_memory(); }

// At once: an allocation of pinned memory may wait for the device.
void SkipWatch::add_memory() {
  const auto memory = pinned_bytes(2 * kWindows, device_);
  for (int64_t i = 0; i < int64_t{kWindows}; ++i) free_.push_back({memory.narrow(0, 2 * i, 2), {}});
}

void SkipWatch::note(const DeviceReport& report, int64_t step, std::string non_finite_at) {
  if (free_.empty()) add_memory();
  windows_.push_back({std::move(free_.back()), step, std::move(non_finite_at)});
  free_.pop_back();
  auto& flags = windows_.back().flags;
  flags.memory.copy_(report.flags(), /*non_blocking=*/true);
  flags.copied.record(device_);
}

void SkipWatch::look() {
  for (; !windows_.empty() && windows_.front().flags.copied.has_passed(); windows_.pop_front()) {
    auto& window = windows_.front();
    const auto* flags = window.flags.memory.const_data_ptr<uint8_t>();
    const bool is_skipped = flags[0] != 0, is_dropped = flags[1] != 0;
    free_.push_back(std::move(window.flags));
    if (is_dropped) continue;
    in_a_row_ = is_skipped ? in_a_row_ + 1 : 0;
    if (in_a_row_ == 0) continue;
    step_ = window.step;
    if (!window.non_finite_at.empty()) non_finite_at_ = std::move(window.non_finite_at);
  }
}

}  // namespace muster
