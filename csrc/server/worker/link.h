// A worker's connections to one server.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "net/channel.h"
#include "server/protocol/protocol.h"

namespace muster::server {

/// The connection broke. Never reaches the user: the client connects again, or throws PeerLost.
class LinkBroken : public CommError {
 public:
  using CommError::CommError;
};

/// Lane 0 carries requests that are answered one by one; the others chunks, many under way. A thread of its own sends
/// signs of life over a connection of its own, and breaks the link when the server gives none. Owned by one thread, but
/// for that one.
class Link {
 public:
  struct Config {
    std::string name;
    uint32_t rank = 0;
    uint32_t lanes = 2;  ///< besides lane 0
    std::chrono::milliseconds heartbeat{5'000};
  };

  explicit Link(Config config);
  ~Link();
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  const std::string& name() const noexcept { return config_.name; }

  /// Connects all lanes as `incarnation` (0: asks for one), which shares `memory`; returns the incarnation. Throws
  /// LinkBroken where that fails, what the server answers otherwise.
  uint64_t connect(uint64_t incarnation, const std::shared_ptr<net::Arena>& memory);
  /// Begins to send signs of life. Once.
  void keep_alive();
  /// Forgets what is under way, and closes.
  void disconnect() noexcept;

  bool is_broken() const noexcept { return broken_; }
  /// Whether the server ended a lane on which nothing is under way; breaks the link then. Does not block.
  bool has_ended();
  /// How often it was connected: what was under way before another connect() is gone.
  uint64_t connects() const noexcept { return connects_; }
  /// The life of the server that it is connected to.
  uint64_t life() const noexcept { return life_; }

  /// Sends on lane 0. Throws LinkBroken.
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

  /// Up to which step the server has this worker's pushes in a snapshot.
  uint64_t durable() const noexcept { return durable_; }
  void note_durable(uint64_t step) noexcept;
  void want_snapshot() noexcept { wants_snapshot_ = true; }

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
  std::shared_ptr<net::Channel> greet(uint32_t lane, uint64_t& incarnation, const std::shared_ptr<net::Arena>& memory);
  void beat() noexcept;
  void close_lanes() noexcept;

  const Config config_;
  std::vector<Lane> lanes_;
  uint64_t connects_ = 0;
  std::atomic<bool> broken_{true};
  std::atomic<uint64_t> life_{0};
  std::atomic<uint64_t> incarnation_{0};
  std::atomic<uint64_t> durable_{0};
  std::atomic<bool> wants_snapshot_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<net::Channel>> open_;  // what the other thread may close; guarded by mutex_
  std::shared_ptr<net::Channel> beats_;              // likewise
  bool stops_ = false;                               // guarded by mutex_
  std::thread thread_;
};

}  // namespace muster::server
