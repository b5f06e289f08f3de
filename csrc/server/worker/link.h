// A worker's connections to one server.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "net/channel.h"
#include "server/protocol/protocol.h"
#include "server/worker/pulse.h"
#include "server/worker/surroundings.h"

namespace muster::server {

/// The connection broke, or was made anew while an answer was awaited. Never reaches the user: the client connects
/// again, or throws PeerLost.
class LinkBroken : public CommError {
 public:
  using CommError::CommError;
};

/// The server reads its snapshot; it is to be asked again.
class LinkBusy : public LinkBroken {
 public:
  using LinkBroken::LinkBroken;
};

/// The server's process listens at its address and gives no answer within the heartbeat's time, or the Pulse has ended
/// the link: it may stand still.
class LinkSilent : public LinkBroken {
 public:
  using LinkBroken::LinkBroken;
};

/// Lane 0 carries requests that are answered one by one; the others chunks, many under way. Its Pulse breaks the link
/// when the server gives no sign of life. Owned by one thread, but for the one that ticks the pulse. A forked child may
/// only destroy it, which leaves the connections to its parent.
class Link {
 public:
  struct Config {
    std::string name;
    uint32_t rank = 0;
    uint32_t lanes = 2;  ///< besides lane 0
    std::chrono::milliseconds heartbeat{5'000};
    std::shared_ptr<Surroundings> surroundings = Surroundings::of_process();
    std::string token = {};  ///< see Hello
    bool takes_over = false;
  };

  explicit Link(Config config);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  const std::string& name() const noexcept { return config_.name; }

  /// Connects all lanes as `incarnation` (0: asks for one), which shares `memory`; returns the incarnation. Throws
  /// LinkBroken where that fails, what the server answers otherwise. Calls `between` every 50 ms or so, and throws what
  /// it throws.
  uint64_t connect(uint64_t incarnation, const std::shared_ptr<net::Arena>& memory,
                   const std::function<void()>& between);
  /// Begins to send signs of life. Once, after connect().
  void keep_alive();
  /// Forgets what is under way, and closes.
  void disconnect() noexcept;

  /// Also in a forked child.
  bool is_broken() const noexcept;
  /// Whether the server ended a lane on which nothing is under way; breaks the link then. Does not block.
  bool has_ended();
  /// How often it was connected: what was under way before another connect() is gone.
  uint64_t connects() const noexcept { return connects_; }
  /// The life of the server that it is connected to.
  uint64_t life() const noexcept { return life_; }

  /// Sends on lane 0. Throws LinkBroken. A send waits for a server that does not read, and calls the thread's WaitHook
  /// meanwhile; what that throws breaks the link.
  template <class Message>
  void send(const Message& message, std::span<const net::Bytes> payload = {}) {
    send(0, Message::kType, encode(message), payload);
  }
  /// The answer to it. `between` is called every 50 ms or so. Throws LinkBroken, or what the server answered instead.
  template <class Message>
  Message receive(const std::function<void()>& between) {
    const net::Frame frame = receive(0, {}, between);
    return expect<Message>(frame);
  }

  /// A chunk's request on the chunk's lane. `done` is called with its answer, by this or a later call; where too many
  /// are under way this waits for the first of them. `to`: where a payload that follows the answer goes, or null.
  using Answer = std::function<void(const net::Frame& answer)>;
  void send_chunk(uint32_t chunk, uint16_t type, std::string_view message, std::span<const net::Bytes> payload,
                  std::span<std::byte> to, Answer done, const std::function<void()>& between);
  /// Waits for the answers of what is under way on a chunk's lane: what is large both ways must not queue there.
  void drain_lane(uint32_t chunk, const std::function<void()>& between);
  /// Waits for the answers of everything that is under way.
  void drain(const std::function<void()>& between);
  size_t under_way() const noexcept;

  /// Up to which step the server has this worker's pushes in snapshots.
  Durable durable() const noexcept { return pulse_.durable(); }
  void note_durable(const Durable& durable) noexcept { pulse_.note_durable(durable); }
  void want_snapshot() noexcept { pulse_.want_snapshot(); }

  /// Decodes an answer. Throws what the server answered instead.
  template <class Message>
  static Message expect(const net::Frame& frame) {
    if (frame.type == Refusal::kType) raise(decode<Refusal>(frame.message));
    if (frame.type != Message::kType) refuse(frame.type);
    return decode<Message>(frame.message);
  }

 private:
  struct UnderWay {
    std::span<std::byte> to;
    Answer done;
  };
  struct Lane {
    std::shared_ptr<net::Channel> channel;
    std::deque<UnderWay> under_way;
  };

  [[noreturn]] static void refuse(uint16_t type);
  [[noreturn]] void break_with(const std::string& what);
  void send(size_t lane, uint16_t type, std::string_view message, std::span<const net::Bytes> payload);
  net::Frame receive(size_t lane, std::span<std::byte> to, const std::function<void()>& between);
  bool has_input(const net::Channel* channel);
  void take_answer(Lane& lane, size_t index, const std::function<void()>& between);
  std::shared_ptr<net::Channel> greet(uint32_t lane, uint64_t& incarnation, const std::shared_ptr<net::Arena>& memory,
                                      const std::function<void()>& between);
  net::Deadline in(std::chrono::milliseconds duration) const { return config_.surroundings->now() + duration; }
  bool is_own() const noexcept;  // not a forked child's copy
  void close_lanes(const std::string& why) noexcept;

  const Config config_;
  const pid_t process_;
  std::vector<Lane> lanes_;
  uint64_t connects_ = 0;
  uint64_t life_ = 0;
  std::atomic<bool> broken_{true};
  std::mutex mutex_;
  std::vector<std::shared_ptr<net::Channel>> open_;  // what the pulse may close; guarded by mutex_
  std::string end_;                                  // why it did, where that was not said; likewise
  bool is_kept_alive_ = false;
  Pulse pulse_;
};

}  // namespace muster::server
