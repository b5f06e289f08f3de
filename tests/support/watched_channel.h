// A worker's end of a connection, of which somebody is told what goes over it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "net/channel.h"
#include "server/worker/surroundings.h"

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

/// Those of the process, with watched connections.
class WatchedSurroundings final : public server::Surroundings {
 public:
  /// Of a connection to the server of this name.
  using Watch = std::function<std::shared_ptr<ChannelWatcher>(const std::string& name)>;

  explicit WatchedSurroundings(Watch watch) : watch_(std::move(watch)) {}

  Clock::time_point now() override { return of_process()->now(); }
  void sleep(std::chrono::milliseconds duration) override { of_process()->sleep(duration); }
  std::unique_ptr<net::Channel> connect(const std::string& name, std::shared_ptr<net::Arena> memory,
                                        net::Deadline deadline) override {
    return std::make_unique<WatchedChannel>(of_process()->connect(name, std::move(memory), deadline), watch_(name));
  }
  void start(server::Pulse& pulse) override { of_process()->start(pulse); }
  void stop(server::Pulse& pulse) noexcept override { of_process()->stop(pulse); }

 private:
  const Watch watch_;
};

}  // namespace muster::testing
