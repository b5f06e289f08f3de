// A worker's end of the parameter servers: pushes, steps and reads that survive lost connections and restarted servers.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "server/link.h"
#include "server/plan.h"
#include "server/protocol.h"
#include "server/push_log.h"

namespace muster::server {

struct ClientConfig {
  std::vector<std::string> servers;  ///< abstract Unix names, in the order of all workers
  uint32_t rank = 0;
  Plan plan;                                  ///< servers: their number
  uint32_t lanes = 2;                         ///< connections to each server for chunks
  bool shares_memory = true;                  ///< large payloads stay in memory that servers map; else they travel
  uint64_t log_bytes = uint64_t{256} << 20;   ///< of pushes that are kept until they are durable, at most
  std::chrono::milliseconds patience{5'000};  ///< how long a server may be gone
};

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
  uint64_t incarnation() const noexcept { return incarnation_; }

  /// Whether the servers hold values already; else the chief writes them, and starts.
  bool is_started() const noexcept { return is_started_; }
  void write(uint32_t chunk, Part part, Bytes values);
  void start();
  /// Waits for start. Returns the step after which this worker comes in.
  uint64_t join();

  /// Memory in which parameters that are read need not be copied again; 64-byte aligned, lives as long as the client.
  std::byte* allocate(uint64_t bytes);

  /// Copies the pieces (a chunk's gradient bytes together) and sends them; does not wait for the server, but where the
  /// log is full for a snapshot. Steps ascend; every chunk of a step is pushed once. A lost connection is left to the
  /// next call that waits.
  void push(uint64_t step, uint32_t chunk, std::span<const Bytes> pieces);

  /// Waits until the servers hold everything that was pushed.
  void flush();

  /// After flush(), or once the step is applied: waits until the step may go on. See Quorum.
  Decision commit(uint64_t step, std::vector<double> numbers, std::string record = {});

  /// The next batch for this worker of a pass over a loader, of `batches`; see Dealer. `finished`: those of the pass
  /// that are done with and were in no step.
  Dealt deal(uint32_t loader, uint64_t epoch, uint64_t batches, std::vector<uint64_t> finished);
  /// Leaves a pass: others get what this worker was dealt and has not finished.
  void end_pass(uint32_t loader, uint64_t epoch, uint64_t batches, std::vector<uint64_t> finished);

  /// Sums of squares by tile of the sums over `members`, chunk by chunk.
  std::vector<double> sum(uint64_t step, const std::vector<uint32_t>& members);

  /// Makes a step on all servers; returns when all have.
  void apply(const Apply& command);
  /// The same of a synchronous step, and a read of the parameters, each chunk as soon as it has made the step.
  void apply_and_read(const Apply& command, const std::vector<std::byte*>& to);

  /// A part of all chunks that have made `at_least` steps: chunk c goes to `to[c]` (none: nullptr), of the part's
  /// bytes. Returns by chunk whether there was such a part.
  std::vector<bool> read(Part part, uint64_t at_least, const std::vector<std::byte*>& to);
  uint64_t part_bytes(uint32_t chunk, Part part) const;

  /// Up to which step all servers have this worker's pushes in snapshots.
  uint64_t durable() const noexcept;

  /// Leaves all servers in good order; no call may follow.
  void leave();

 private:
  using Clock = std::chrono::steady_clock;

  Link& link_of(uint32_t chunk) { return *links_[static_cast<size_t>(chunks_[chunk].server)]; }
  void connect(size_t server, bool is_first);
  void recover(size_t server);
  void replay(size_t server);
  void heal();
  void wait_a_slice(Clock::time_point deadline);
  std::function<void()> between();
  Clock::time_point limit() const;
  void send_push(const PushLog::Entry& entry, uint32_t chunk);
  PushLog::Entry& entry_of(uint64_t step);
  void note_command(const Apply& command);
  void note_applied(const std::vector<Applied>& answers);
  [[noreturn]] void lose(size_t server, const std::string& why) const;

  template <class Answer, class Message>
  Answer call(size_t server, const Message& message);
  template <class Answer, class Message>
  std::vector<Answer> call_all(const Message& message);
  /// The answers to `message`, which was sent on the links whose connects() are `sent` (0: it was not).
  template <class Answer, class Message>
  std::vector<Answer> receive_all(const Message& message, const std::vector<uint64_t>& sent);
  template <class Message>
  std::vector<uint64_t> send_all(const Message& message);
  /// Calls `request`; where it throws, answers that are under way are forgotten with their connections.
  template <class F>
  auto whole(const F& request);
  template <class F>
  auto retried(size_t server, const F& request);

  const ClientConfig config_;
  const std::vector<Chunk> chunks_;
  std::shared_ptr<net::Arena> memory_;  // null where payloads travel
  std::vector<std::unique_ptr<std::byte[]>> heap_;
  std::unique_ptr<PushLog> log_;
  std::vector<std::unique_ptr<Link>> links_;  // by server
  std::vector<bool> healing_;                 // likewise
  uint64_t incarnation_ = 0;
  uint64_t joined_at_ = 0;
  uint64_t deals_ = 0;
  bool is_started_ = false;
  bool has_joined_ = false;
  std::optional<Decision> last_decision_;
};

}  // namespace muster::server
