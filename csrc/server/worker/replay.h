// The pushes and commands of a worker that a server may lack after its connection was lost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "net/shared_segment.h"
#include "server/protocol/plan.h"
#include "server/protocol/protocol.h"
#include "server/worker/client_config.h"
#include "server/worker/link.h"
#include "server/worker/push_log.h"

namespace muster::server {

/// Throws PeerLost that names a server which stays away.
[[noreturn]] void lose(const ClientConfig& config, size_t server, const std::string& why);

/// Externally synchronised. `between` is called while it waits, as by Link.
class Replay {
 public:
  using Between = std::function<void()>;

  /// `config` and `chunks` must outlive it. `memory` as for PushLog.
  Replay(const ClientConfig& config, const std::vector<Chunk>& chunks, std::shared_ptr<net::Arena> memory)
      : config_(config), chunks_(chunks), log_(chunks, std::move(memory), config.log_bytes) {}

  PushLog& log() noexcept { return log_; }

  /// Keeps the command of a step that was pushed, for servers that lack it. Throws InvalidArgument where it was not, or
  /// not all tables were.
  void note_command(const Apply& command);
  /// Throws InvalidArgument for a table that was not pushed: servers would wait for it.
  void check_tables(const PushLog::Entry& entry) const;

  static void send_push(Link& link, uint64_t step, uint32_t chunk, std::span<const Bytes> values,
                        const Between& between);
  /// All parts of a table take one lane: servers take them in order.
  static void send_rows(Link& link, uint64_t step, const PushLog::Rows& rows, const Between& between);

  /// Asks the server how far it is, and sends it the pushes and commands that it lacks, in order, of a worker that came
  /// in after `joined_at`. Throws LinkBroken, PeerLost where the server holds other chunks, CheckpointError where it
  /// lacks what is not kept any more. `between()` is what one of its waits calls.
  void resend(size_t server, Link& link, uint64_t joined_at, const std::function<Between()>& between);

 private:
  const ClientConfig& config_;
  const std::vector<Chunk>& chunks_;
  PushLog log_;
};

}  // namespace muster::server
