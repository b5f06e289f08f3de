#include "support/watched_channel.h"

#include <utility>

namespace muster::testing {

using namespace net;

WatchedChannel::WatchedChannel(std::unique_ptr<Channel> channel, std::shared_ptr<ChannelWatcher> watcher)
    : channel_(std::move(channel)), watcher_(std::move(watcher)) {}

void WatchedChannel::send(uint16_t type, std::string_view message, std::span<const Bytes> payload, Deadline deadline) {
  watcher_->sends(type);
  channel_->send(type, message, payload, deadline);
  under_way_.push_back(type);
  watcher_->sent(type);
}

Bytes WatchedChannel::begin_send(uint16_t type, std::string_view message, Bytes payload,
                                 std::chrono::milliseconds patience) {
  return channel_->begin_send(type, message, payload, patience);
}

void WatchedChannel::end_send(Bytes rest, Deadline deadline) { channel_->end_send(rest, deadline); }

bool WatchedChannel::receive(Frame& frame, Deadline deadline, const Placer& place) {
  if (!channel_->receive(frame, deadline, place)) return false;
  if (under_way_.empty()) return true;
  const uint16_t request = under_way_.front();
  under_way_.pop_front();
  watcher_->answered(request);
  return true;
}

}  // namespace muster::testing
