#include "window/skip_watch.h"

#include <utility>

namespace muster {

void SkipWatch::note(const DeviceReport& report, int64_t step, std::string non_finite_at) {
  const auto flags = report.flags();
  windows_.push_back({std::move(free_), {}, step, std::move(non_finite_at)});
  if (!windows_.back().flags.defined()) windows_.back().flags = pinned_bytes(2, flags.device());
  windows_.back().flags.copy_(flags, /*non_blocking=*/true);
  windows_.back().copied.record(flags.device());
}

void SkipWatch::look() {
  for (; !windows_.empty() && windows_.front().copied.has_passed(); windows_.pop_front()) {
    auto& window = windows_.front();
    free_ = window.flags;
    const auto* flags = free_.const_data_ptr<uint8_t>();
    if (flags[1] != 0) continue;
    in_a_row_ = flags[0] != 0 ? in_a_row_ + 1 : 0;
    if (in_a_row_ == 0) continue;
    step_ = window.step;
    if (!window.non_finite_at.empty()) non_finite_at_ = std::move(window.non_finite_at);
  }
}

}  // namespace muster
