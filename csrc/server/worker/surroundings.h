// Time and connections, as a worker's end of the parameter servers sees them.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "net/channel.h"

namespace muster::server {

class Pulse;

/// What the code of a worker's end asks for the time, for connections, and to be called again; tests give others. It
/// waits nowhere but in sleep() and in calls of a Channel. Thread-safe.
class Surroundings {
 public:
  using Clock = std::chrono::steady_clock;

  virtual ~Surroundings() = default;

  /// Deadlines of channels are compared with it.
  virtual Clock::time_point now() = 0;
  virtual void sleep(std::chrono::milliseconds duration) = 0;
  /// As net::connect_on_host.
  virtual std::unique_ptr<net::Channel> connect(const std::string& name, std::shared_ptr<net::Arena> memory,
                                                net::Deadline deadline) = 0;

  /// Calls pulse.tick() from now on, as that says. Throws CommError where the system has no thread for it.
  virtual void start(Pulse& pulse) = 0;
  /// Returns once no call is under way, and none will come.
  virtual void stop(Pulse& pulse) noexcept = 0;

  /// The system's clock, connections on this host, and the process's Heart.
  static const std::shared_ptr<Surroundings>& of_process();
};

}  // namespace muster::server
