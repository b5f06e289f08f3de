// A worker's end of the parameter servers: pushes, steps and reads that survive lost connections and restarted servers.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "server/protocol/plan.h"
#include "server/protocol/protocol.h"
#include "server/worker/link.h"
#include "server/worker/push_log.h"

namespace muster::server {

/// How long a server may be gone, unless something else is said.
inline constexpr std::chrono::milliseconds kPatience{5'000};

struct ClientConfig {
  std::vector<std::string> servers;  ///< abstract Unix names, in the order of all workers
  uint32_t rank = 0;
  Plan plan;                                 ///< servers: their number
  uint64_t job = 0;                          ///< greater than that of any job before on the same servers, or equal
  std::string facts = {};                    ///< for Standing
  uint32_t lanes = 2;                        ///< connections to each server for chunks
  bool shares_memory = true;                 ///< large payloads stay in memory that servers map; else they travel
  uint64_t log_bytes = uint64_t{256} << 20;  ///< of pushes that are kept until they are durable, at most
  std::chrono::milliseconds patience = kPatience;
};

/// What sums of a step are made of.
struct Statistics {
  std::vector<double> chunks;               ///< partials by tile, chunk by chunk; see kernels::grad_stats
  std::vector<std::vector<double>> tables;  ///< by table: of each summed row by itself (num_tiles(dim)), rows ascending
};

/// Rows of a table that were ever written or pushed, ascending.
struct TableRows {
  std::vector<int64_t> rows;
  std::vector<float> values;  ///< rows.size() * dim
  std::vector<float> states;  ///< rows.size() * state_width(table)
  uint64_t steps = 0;         ///< that the optimizer counts
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
  /// Rows of a table (each once, in any order) that differ from its initialiser's: values (dim a row) and states
  /// (state_width a row); and how many steps its optimizer has counted.
  void write_rows(uint32_t table, std::span<const int64_t> rows, std::span<const float> values,
                  std::span<const float> states);
  void write_row_steps(uint32_t table, uint64_t steps);
  void start();
  /// Waits for start. Returns the step after which this worker comes in.
  uint64_t join();
  /// Of each loader that had been dealt from when this worker joined, the pass of the greatest epoch.
  const std::vector<PassId>& passes_at_join() const noexcept { return passes_at_join_; }

  /// Memory in which parameters that are read need not be copied again; 64-byte aligned, lives as long as the client.
  std::byte* allocate(uint64_t bytes);

  /// Sends the pieces (a chunk's gradient bytes together); does not wait for the server, but where the log is full for
  /// a snapshot. Steps ascend; every chunk of a step is pushed once. A lost connection is left to the next call that
  /// waits. With an `owner`, which keeps the pieces, they must not change before commit() of a synchronous step, or
  /// apply() of another, has returned: they are copied by then, if they are to be kept. Without one they are copied at
  /// once.
  void push(uint64_t step, uint32_t chunk, std::span<const Bytes> pieces, std::shared_ptr<const void> owner = {});

  /// The same of a table: this worker's sums of rows (strictly ascending; gradients: rows.size() * dim), for all
  /// servers. Every table of a step is pushed once, perhaps without rows.
  void push_rows(uint64_t step, uint32_t table, std::span<const int64_t> rows, std::span<const float> gradients);

  /// Waits until the servers hold everything that was pushed.
  void flush();

  /// After flush(), or once the step is applied: waits until the step may go on. See Quorum.
  Decision commit(uint64_t step, std::vector<double> numbers, std::string record = {});

  /// The next batch for this worker of a pass over a loader, of `batches`; see Dealer. `finished`: those of the pass
  /// that are done with and were in no step.
  Dealt deal(uint32_t loader, uint64_t epoch, uint64_t batches, std::vector<uint64_t> finished);
  /// Leaves a pass: others get what this worker was dealt and has not finished.
  void end_pass(uint32_t loader, uint64_t epoch, uint64_t batches, std::vector<uint64_t> finished);

  /// The statistics of the sums over `members`; they do not depend on the number of servers.
  Statistics sum(uint64_t step, const std::vector<uint32_t>& members);

  /// Makes a step on all servers; returns when all have.
  void apply(const Apply& command);
  /// The same of a synchronous step, and a read of the parameters, each chunk as soon as it has made the step.
  void apply_and_read(const Apply& command, const std::vector<std::byte*>& to);

  /// A part of all chunks that have made `at_least` steps: chunk c goes to `to[c]` (none: nullptr), of the part's
  /// bytes. Returns by chunk whether there was such a part.
  std::vector<bool> read(Part part, uint64_t at_least, const std::vector<std::byte*>& to);
  uint64_t part_bytes(uint32_t chunk, Part part) const;

  /// Values of rows (in any order, which may repeat; values: rows.size() * dim), once the table has made `at_least`
  /// steps.
  void pull_rows(uint32_t table, uint64_t at_least, std::span<const int64_t> rows, std::span<float> values);
  /// All rows that servers keep, once the table has made `at_least` steps. Where others step meanwhile, rows may be of
  /// different steps.
  TableRows fetch_rows(uint32_t table, uint64_t at_least);
  /// Floats of optimizer state a row; see RowTable.
  int64_t state_width(uint32_t table) const { return state_widths_.at(table); }

  /// Up to which step all servers have this worker's pushes in snapshots.
  uint64_t durable() const noexcept;

  /// Leaves all servers in good order; no call may follow.
  void leave();

 private:
  using Clock = std::chrono::steady_clock;
  struct SumsOfTable {
    std::vector<int64_t> rows;
    std::vector<double> partials;
    uint64_t asked = 0;  // rows that the next part begins behind
    uint64_t total = 1;  // known with the first answer
  };

  Link& link_of(uint32_t chunk) { return *links_[static_cast<size_t>(chunks_[chunk].server)]; }
  void connect(size_t server, bool is_first);
  void recover(size_t server);
  void replay(size_t server);
  void heal();
  void wait_a_slice(Clock::time_point deadline);
  std::function<void()> between();
  Clock::time_point limit() const;
  void send_push(uint64_t step, uint32_t chunk, std::span<const Bytes> values);
  void send_rows(uint64_t step, const PushLog::Rows& rows);
  /// What `take` gives, once the log has room.
  template <class F>
  auto wait_for_log(const F& take);
  PushLog::Entry& entry_of(uint64_t step);
  const TableSpec& table(uint32_t index) const;
  std::vector<std::vector<size_t>> divide(const TableSpec& table, std::span<const int64_t> rows) const;
  void check_tables(const PushLog::Entry& entry) const;
  void sum_rows(uint64_t step, const std::vector<uint32_t>& members, std::vector<std::vector<SumsOfTable>>& sums);
  std::byte* landing_of(size_t server, uint32_t lane);
  std::optional<uint64_t> shared_place(std::span<const std::byte> memory) const noexcept;
  void note_command(const Apply& command);
  void help_apply(const Apply& command);
  void note_applied(const std::vector<Applied>& answers);
  [[noreturn]] void lose(size_t server, const std::string& why) const;

  template <class Answer, class Message>
  Answer call(size_t server, const Message& message, const std::function<void()>& meanwhile = {});
  template <class Answer, class Message>
  std::vector<Answer> call_all(const Message& message, const std::function<void()>& meanwhile = {});
  /// The answers to `message`, which was sent on the links whose connects() are `sent` (0: it was not).
  template <class Answer, class Message>
  std::vector<Answer> receive_all(const Message& message, const std::vector<uint64_t>& sent);
  template <class Message>
  std::vector<uint64_t> send_all(const Message& message);
  /// Calls `ask(server, i)`, which sends on a lane for chunks, for i below each server's count, and waits for all
  /// answers; asks a server anew whose connection was lost meanwhile.
  void ask_all(const std::vector<size_t>& counts, const std::function<void(size_t server, size_t i)>& ask);
  /// Calls `request`; where it throws, answers that are under way are forgotten with their connections, and what the
  /// caller pushed is its own again.
  template <class F>
  auto whole(const F& request);
  template <class F>
  auto retried(size_t server, const F& request);

  const ClientConfig config_;
  const std::vector<Chunk> chunks_;
  std::vector<int64_t> state_widths_;   // by table
  std::shared_ptr<net::Arena> memory_;  // null where payloads travel
  std::vector<std::unique_ptr<std::byte[]>> heap_;
  std::unique_ptr<PushLog> log_;
  std::vector<std::unique_ptr<Link>> links_;  // by server
  std::vector<bool> healing_;                 // likewise
  /// Where rows that are pulled arrive, by server and lane. Over a connection that was lost, a server may still write
  /// what was asked for: such a landing rests until no request can be served any more.
  struct Landing {
    uint64_t connects = 0;
    std::byte* memory = nullptr;
  };
  std::vector<Landing> landings_;
  std::deque<std::pair<Clock::time_point, std::byte*>> resting_;
  uint64_t incarnation_ = 0;
  uint64_t joined_at_ = 0;
  std::vector<PassId> passes_at_join_;
  uint64_t deals_ = 0;
  bool is_started_ = false;
  bool has_joined_ = false;
  std::optional<Decision> last_decision_;
};

/// How the job of server 0, at `name`, stands; nothing where nobody listens there for `patience`. Calls the thread's
/// WaitHook. Throws what the server answers otherwise.
std::optional<Standing> inquire(const std::string& name, std::chrono::milliseconds patience);

}  // namespace muster::server
