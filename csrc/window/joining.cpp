#include "window/joining.h"

#include <utility>

#include "server/protocol/wire.h"

namespace muster {

std::string Joining::tell(uint64_t since, double unit, const kernels::LossScaleState& scale) {
  began_as_ = state_;
  if (!is_asked()) return {};
  report_.since = since;
  report_.unit = unit;
  report_.loss_scale = static_cast<double>(scale.scale);
  report_.growth_tracker = static_cast<uint32_t>(scale.growth_tracker);
  return server::encode(report_);
}

void Joining::begin_hearing() noexcept {
  is_asked_ = has_earlier_members_ = false;
  heard_.reset();
}

void Joining::hear(bool watches, const std::string& encoded) {
  is_asked_ |= watches;
  has_earlier_members_ |= !watches;
  if (encoded.empty()) return;
  auto report = server::decode<JoinReport>(encoded);
  if (!heard_ || report.since < heard_->since) heard_ = std::move(report);
}

std::optional<JoinReport> Joining::learn(bool stepped) {
  // The report is of the window's beginning: buffers that came at its end are younger.
  const bool is_told = stepped && began_as_ != State::listening && heard_;
  if (has_earlier_members_ && !is_told) return std::nullopt;
  state_ = State::member;
  return std::exchange(heard_, std::nullopt);
}

}  // namespace muster
