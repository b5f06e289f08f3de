// One connection of a server.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "net/channel.h"
#include "server/shard/server.h"

namespace muster::server {

/// Its thread owns it, but for `channel->close()`, which any thread may call, and `is_over`.
struct ParameterServer::Session {
  std::unique_ptr<net::Channel> channel;
  std::thread thread;
  Deadline hello;  // until when it has to be known
  std::atomic<bool> is_over{false};
  /// Of the worker, after Hello; written under the server's mutex.
  bool is_known = false;
  uint32_t rank = 0;
  uint32_t lane = 0;
  uint64_t incarnation = 0;
  bool leaves = false;
  bool beats = false;           ///< signs of life come over it; written under the server's mutex
  std::vector<std::byte> copy;  // of values that travel
};

template <class Message>
void ParameterServer::reply(Session& session, const Message& message, std::span<const net::Bytes> payload) {
  session.channel->send(Message::kType, encode(message), payload, reply_deadline());
}

}  // namespace muster::server
