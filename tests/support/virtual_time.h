// A worker's surroundings whose time passes by itself: nothing waits, and every run is the same.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "server/worker/pulse.h"
#include "server/worker/surroundings.h"
#include "support/memory_channel.h"

namespace muster::testing {

/// For one thread, which is the worker; outlives its channels. While that waits, servers answer what has come, and time
/// goes on to the next pulse or deadline.
class VirtualTime final : public server::Surroundings, public Waiting {
 public:
  /// What a server does with a frame, which has at most 200 KiB; must not wait.
  using Serve = std::function<void(net::Channel& channel, const net::Frame& frame)>;

  /// Somebody listens at `name`. Without `serve` connections are made and nothing is ever read.
  void listen(const std::string& name, Serve serve);
  /// The server of `name` is gone, and its connections end.
  void end(const std::string& name);
  /// Since the beginning.
  std::chrono::milliseconds passed() const;

  Clock::time_point now() override { return now_; }
  void sleep(std::chrono::milliseconds duration) override;
  std::unique_ptr<net::Channel> connect(const std::string& name, std::shared_ptr<net::Arena> memory,
                                        net::Deadline deadline) override;
  void start(server::Pulse& pulse) override { pulses_[&pulse] = now_; }
  void stop(server::Pulse& pulse) noexcept override { pulses_.erase(&pulse); }

  bool wait(std::unique_lock<std::mutex>& lock, net::Deadline deadline, const std::function<bool()>& is_ready) override;
  void notify() override {}

 private:
  struct Server {
    Serve serve;
    std::vector<std::unique_ptr<net::Channel>> channels;
  };

  bool serve_all();
  void go_on(net::Deadline until);

  const Clock::time_point begin_{std::chrono::hours(1)};
  Clock::time_point now_ = begin_;
  std::map<std::string, Server> servers_;
  std::map<server::Pulse*, Clock::time_point> pulses_;  // and when they are due
};

}  // namespace muster::testing
