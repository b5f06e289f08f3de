// One connection of a server.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "net/channel.h"
#include "server/protocol/protocol.h"
#include "server/shard/timekeeper.h"

namespace muster::server {

/// Used by one thread at a time, but for `channel->close()`, which any thread may call.
struct Session {
  explicit Session(std::unique_ptr<net::Channel> channel) : channel(std::move(channel)) {}

  const std::unique_ptr<net::Channel> channel;
  /// Of the worker, after Hello; written under the core's mutex.
  std::atomic<bool> is_known{false};
  uint32_t rank = 0;
  uint32_t lane = 0;
  uint64_t incarnation = 0;
  std::string token;            ///< of its job
  std::optional<uint64_t> job;  ///< that Configure named, on this connection
  Timekeeper::Time greeted{};   ///< when Hello came
  bool leaves = false;          ///< nothing follows
  std::vector<std::byte> copy;  ///< of values that travel
};

}  // namespace muster::server
