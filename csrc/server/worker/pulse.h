// Signs of life between a worker and one server.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "net/channel.h"
#include "server/protocol/protocol.h"
#include "server/worker/surroundings.h"

namespace muster::server {

/// Sends them over a connection of its own, and takes the answers: a state machine without thread or clock, which
/// whoever keeps it advances with tick().
class Pulse {
 public:
  using TimePoint = Surroundings::Clock::time_point;
  struct Config {
    std::string name;
    uint32_t rank = 0;
    std::chrono::milliseconds heartbeat{5'000};
    std::string token = {};  ///< see Hello
    bool takes_over = false;
  };
  /// tick() is to be called again at `due`, or when `descriptor` (-1: none) is readable.
  struct Next {
    TimePoint due;
    int descriptor;
  };

  /// `on_end(why)` is called by tick(), once or repeatedly, when the server ended the connection or has given no answer
  /// for the heartbeat's time. `surroundings` must outlive it.
  Pulse(Config config, Surroundings& surroundings, std::function<void(const std::string& why)> on_end);
  Pulse(const Pulse&) = delete;
  Pulse& operator=(const Pulse&) = delete;

  /// The server has welcomed this worker as `incarnation`: it lives. Before the first tick, and thread-safe as what
  /// follows.
  void note_welcome(uint64_t incarnation) noexcept;
  /// The next sign of life, 50 ms from now at the latest, asks for a snapshot.
  void want_snapshot() noexcept { wants_snapshot_ = true; }
  /// Up to which step the server has this worker's pushes in snapshots.
  Durable durable() const noexcept { return {durable_, newest_}; }
  void note_durable(const Durable& durable) noexcept;

  /// By one thread at a time. Waits for nothing, but 10 ms for the rest of a frame that has begun.
  Next tick(TimePoint now) noexcept;

 private:
  enum class State {
    apart,     ///< without a connection, until `since_`: then it tries again
    greeting,  ///< has sent Hello
    waiting,   ///< has sent Beat
    resting,   ///< was answered
  };

  void connect(TimePoint now);
  void take_answer(TimePoint now);
  void check_silence(TimePoint now) const;
  void lose(TimePoint now, const std::string& why);
  Next next(TimePoint now) const noexcept;

  const Config config_;
  const std::chrono::milliseconds interval_;  // between an answer and the next sign of life
  const std::chrono::milliseconds slice_;     // between two ticks at most, and two tries to connect
  Surroundings& surroundings_;
  const std::function<void(const std::string& why)> on_end_;
  std::atomic<uint64_t> incarnation_{0};
  std::atomic<uint64_t> durable_{0};  // in all snapshots that it could go on from
  std::atomic<uint64_t> newest_{0};   // in the newest one
  std::atomic<bool> wants_snapshot_{false};
  std::atomic<bool> is_welcome_{false};  // since the last tick
  // Of whoever ticks:
  State state_ = State::apart;
  TimePoint since_;  // when the state began
  TimePoint alive_;  // when the server last was
  std::unique_ptr<net::Channel> channel_;
};

}  // namespace muster::server
