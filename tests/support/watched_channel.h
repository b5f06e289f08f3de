// A worker's end of a connection, of which somebody is told what goes over it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>

#include "net/channel.h"

namespace muster::testing {

/// Called by the channel's users, in their calls; what it throws is theirs.
class ChannelWatcher {
 public:
  virtual ~ChannelWatcher() = default;
  /// A request is sent next.
  virtual void sends(uint16_t /*request*/) {}
  /// It was.
  virtual void sent(uint16_t /*request*/) {}
  /// The answer to a request has come, and is given to the worker next; where this throws, it is lost.
  virtual void answered(uint16_t /*request*/) {}
};

/// Requests are answered in their order. Nothing is asked for by begin_send().
class WatchedChannel : public net::Channel {
 public:
  WatchedChannel(std::unique_ptr<net::Channel> channel, std::shared_ptr<ChannelWatcher> watcher);

  void send(uint16_t type, std::string_view message, std::span<const net::Bytes> payload,
            net::Deadline deadline) override;
  net::Bytes begin_send(uint16_t type, std::string_view message, net::Bytes payload,
                        std::chrono::milliseconds patience) override;
  void end_send(net::Bytes rest, net::Deadline deadline) override;
  bool receive(net::Frame& frame, net::Deadline deadline, const Placer& place) override;
  bool wait_input(net::Deadline deadline) const override { return channel_->wait_input(deadline); }
  int descriptor() const noexcept override { return channel_->descriptor(); }
  std::byte* reach(uint64_t place, uint64_t bytes) const noexcept override { return channel_->reach(place, bytes); }
  std::optional<uint64_t> place_of(const void* data, size_t bytes) const noexcept override {
    return channel_->place_of(data, bytes);
  }
  void close() noexcept override { channel_->close(); }

 private:
  const std::unique_ptr<net::Channel> channel_;
  const std::shared_ptr<ChannelWatcher> watcher_;
  std::deque<uint16_t> under_way_;  // requests
};

}  // namespace muster::testing
