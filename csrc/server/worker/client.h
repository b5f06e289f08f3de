// A worker's end of the parameter servers: pushes, steps and reads that survive lost connections and restarted servers.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "server/protocol/plan.h"
#include "server/protocol/protocol.h"
#include "server/worker/client_config.h"
#include "server/worker/client_memory.h"
#include "server/worker/replay.h"
#include "server/worker/requests.h"
#include "server/worker/row_client.h"

namespace muster::server {

/// Externally synchronised; usable after an error. A call that meets a lost connection connects again and pushes again
/// what the server lacks; one that waits does so for all servers. Every call throws PeerLost naming a server that stays
/// away for `patience`, Fenced when this worker no longer counts, Timeout past the plan's timeout; waits call the
/// thread's WaitHook.
class ServerClient {
 public:
  /// Connects to all servers and compares plans with them: the first worker's counts.
  explicit ServerClient(ClientConfig config);
  ~ServerClient();
  ServerClient(const ServerClient&) = delete;
  ServerClient& operator=(const ServerClient&) = delete;

  const std::vector<Chunk>& chunks() const noexcept { return chunks_; }
  /// Requests about tables.
  RowClient& rows() noexcept { return rows_; }
  uint64_t incarnation() const noexcept { return requests_.incarnation(); }

  /// Whether the servers hold values already; else the chief writes them, and starts.
  bool is_started() const noexcept { return requests_.is_started(); }
  void write(uint32_t chunk, Part part, Bytes values);
  /// The chief's, where they hold none: `write` writes all there are, and is called again where a server started again
  /// before it had them in a snapshot. `passes` go on where they are.
  void start(const std::function<void()>& write, const std::vector<PassProgress>& passes = {});
  /// Waits for start. Returns the step after which this worker comes in. The chief of a job that began after another
  /// one on these servers says where it goes on; throws CheckpointError where they have no step in common.
  uint64_t join();
  /// Of each loader that had been dealt from when this worker joined, the pass of the greatest epoch.
  const std::vector<PassId>& passes_at_join() const noexcept { return passes_at_join_; }

  /// Memory in which parameters that are read need not be copied again; 64-byte aligned, lives as long as the client.
  std::byte* allocate(uint64_t bytes) { return memory_.allocate(bytes); }

  /// Sends the pieces (a chunk's gradient bytes together); does not wait for the server, but where the log is full for
  /// a snapshot. Steps ascend; every chunk of a step is pushed once. A lost connection is left to the next call that
  /// waits. With an `owner`, which keeps the pieces, they must not change before commit() of a synchronous step, or
  /// apply() of another, has returned: they are copied by then, if they are to be kept. Without one they are copied at
  /// once.
  void push(uint64_t step, uint32_t chunk, std::span<const Bytes> pieces, std::shared_ptr<const void> owner = {});

  /// Waits until the servers hold everything that was pushed.
  void flush();

  /// After flush(), or once the step is applied: waits until the step may go on. See Quorum.
  Decision commit(uint64_t step, std::vector<double> numbers, std::string record = {});

  /// The next batch for this worker of a pass over a loader, of `batches`; see Dealer. `finished`: those of the pass
  /// that are done with and were in no step.
  Dealt deal(uint32_t loader, uint64_t epoch, uint64_t batches, std::vector<uint64_t> finished);
  /// Leaves a pass: others get what this worker was dealt and has not finished.
  void end_pass(uint32_t loader, uint64_t epoch, uint64_t batches, std::vector<uint64_t> finished);

  /// How far the passes are that batches were dealt of.
  std::vector<PassProgress> passes();

  /// The norm of the sums over `members`, of all chunks and tables. Its bits do not depend on who has what.
  kernels::NormSum sum(uint64_t step, const std::vector<uint32_t>& members);

  /// Makes a step on all servers; returns when all have. The command's cut is that of the step's decision.
  void apply(Apply command);
  /// The same of a synchronous step, and a read of the parameters, each chunk as soon as it has made the step.
  void apply_and_read(Apply command, const std::vector<std::byte*>& to);

  /// A part of all chunks that have made `at_least` steps: chunk c goes to `to[c]` (none: nullptr), of the part's
  /// bytes. Returns by chunk whether there was such a part.
  std::vector<bool> read(Part part, uint64_t at_least, const std::vector<std::byte*>& to);
  uint64_t part_bytes(uint32_t chunk, Part part) const;

  /// The chief's: has all servers write their parts of a checkpoint; returns once all have begun. By server.
  std::vector<WritesPart> write_parts(const WritePart& request) { return requests_.call_all<WritesPart>(request); }

  /// Up to which step all servers have this worker's pushes in snapshots.
  Durable durable() const noexcept { return requests_.durable(); }

  /// Whether a server stayed away, or is another one.
  bool has_lost_one() const noexcept { return requests_.has_lost_one(); }
  /// Leaves all servers in good order, once they have what was pushed in snapshots; no call may follow.
  void leave();
  /// Leaves after an error of start() or join(); no call may follow.
  void give_up() noexcept { requests_.give_up(); }

 private:
  Link& link_of(uint32_t chunk) { return requests_.link(static_cast<size_t>(chunks_[chunk].server)); }
  void help_apply(const Apply& command);
  void note_command(Apply& command);
  Dealt ask_dealer(const Deal& deal);

  const ClientConfig config_;
  const std::vector<Chunk> chunks_;
  ClientMemory memory_;
  Replay replay_;
  Requests requests_;
  RowClient rows_;
  std::vector<PassId> passes_at_join_;
  uint64_t deals_ = 0;
  uint64_t next_step_ = 1;  // after the last one that was applied
};

/// How the job of server 0, at `name`, stands; nothing where nobody listens there for `patience`. Calls the thread's
/// WaitHook. Throws what the server answers otherwise.
std::optional<Standing> inquire(const std::string& name, std::chrono::milliseconds patience,
                                Surroundings& surroundings = *Surroundings::of_process());

}  // namespace muster::server
