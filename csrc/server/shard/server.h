// A parameter server: listens, keeps members, and serves what protocol.h asks for. It knows no model: everything comes
// from the chief.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <filesystem>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "net/channel.h"
#include "server/protocol/plan.h"
#include "server/protocol/protocol.h"
#include "server/shard/dealer.h"
#include "server/shard/quorum.h"
#include "server/shard/shard.h"

namespace muster::server {

struct ServerConfig {
  std::string name;                      ///< abstract Unix name to listen at
  std::filesystem::path snapshots = {};  ///< a folder of its own; empty: none, and what is applied counts as durable
  std::chrono::milliseconds snapshot_every{30'000};
};

/// Thread-safe. One thread accepts connections and watches members, one writes snapshots, and each connection has one;
/// all end with the object. docs/threading.md has its locks.
class ParameterServer {
 public:
  /// Takes up its newest good snapshot, if there is one, and listens. Throws CommError where the name is taken,
  /// CheckpointError where the snapshots are damaged.
  explicit ParameterServer(ServerConfig config);
  /// Stops: requests that wait fail, connections end.
  ~ParameterServer();
  ParameterServer(const ParameterServer&) = delete;
  ParameterServer& operator=(const ParameterServer&) = delete;

  /// True once workers have joined and all of them have left or died.
  bool is_deserted() const;

  /// Writes a snapshot and waits for it. No-op before Start and without a folder. Throws CheckpointError.
  void snapshot();

  struct Stats {
    uint64_t requests = 0;
    uint64_t pushes = 0;      ///< that were held
    uint64_t duplicates = 0;  ///< pushes that were held or applied before
    uint64_t snapshots = 0;
    int64_t held_bytes = 0;
    size_t connections = 0;
  };
  Stats stats() const;

 private:
  struct Session;
  struct Saved;
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;

  // Threads.
  void watch() noexcept;
  bool accept();
  void keep_snapshots() noexcept;
  void serve(Session& session) noexcept;
  void expire(Clock::time_point now, Clock::duration since_last);
  void reap();

  // Requests; each answers on the session's channel.
  void answer(Session& session, net::Frame& frame);
  void greet(Session& session, const Hello& hello);
  void configure(Session& session, const Configure& request);
  void inquire(Session& session);
  void start(Session& session);
  void join(Session& session, Shard& shard, const Join& request, Deadline deadline);
  void read(Session& session, Shard& shard, const Read& request, Deadline deadline);
  void send_values(Session& session, Shard& shard, const Read& request, Deadline deadline);
  void hold(Session& session, Shard& shard, const Push& request, net::Frame& frame);
  void commit(Session& session, const Commit& request, Deadline deadline);
  void recall(Session& session, const Decision& decision);
  void deal(Session& session, const Deal& request);
  void apply(Session& session, Shard& shard, const Apply& request, Deadline deadline);
  /// What the others step by in a synchronous step, where one of them came in before this worker; else null.
  std::shared_ptr<const Apply> await_seniors(const Session& session, Shard& shard, const Apply& request,
                                             Deadline deadline);
  void beat(Session& session, Shard& shard, const Beat& request);
  void leave(Session& session, Shard& shard);
  /// False where the frame is about something else than rows.
  bool answer_rows(Session& session, Shard& shard, net::Frame& frame, Deadline deadline);
  void hold_rows(Session& session, Shard& shard, const PushRows& request, net::Frame& frame);
  void pull_rows(Session& session, TableShard& tables, const PullRows& request, net::Bytes payload, Deadline deadline);
  void sum_rows(Session& session, TableShard& tables, const SumRows& request, Deadline deadline);

  static Deadline reply_deadline() { return Clock::now() + std::chrono::seconds(60); }  // of a worker that reads
  template <class Message>
  void reply(Session& session, const Message& message, std::span<const net::Bytes> payload = {});
  /// Where values go that a worker asked for: into memory that it shares, or to be sent. Throws InvalidArgument.
  static std::byte* place_for(Session& session, bool shares, uint64_t place, size_t bytes);
  /// Counts a push; returns who pushes this step, where it may be time to add.
  std::vector<uint32_t> note_push(const Shard& shard, uint64_t step, bool is_fresh);
  static void check_members(const std::vector<uint32_t>& members);
  static Quorum::Rules rules_of(const Plan& plan);
  /// With mutex_: ends the job before. Returns whose pushes no longer count.
  std::vector<uint32_t> begin_job(const Configure& request);
  bool may_push(uint32_t rank, uint64_t step) const;
  std::shared_ptr<Shard> shard() const;
  uint64_t durable(const Session& session, Shard& shard) const;
  void restore();

  const ServerConfig config_;
  const uint64_t life_;
  std::unique_ptr<net::ChannelListener> listener_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // a start, a decision, the end
  // Guarded by mutex_:
  Quorum quorum_;
  Dealer dealer_;
  std::shared_ptr<Shard> shard_;  // null before Configure
  uint32_t index_ = 0;            // of this server
  struct Job {
    uint64_t id = 0;
    std::string facts;
    bool is_new = false;  // began after another one, and nobody has joined it
  } job_;
  bool is_filled_ = false;  // with initial values
  bool started_ = false;    // which are durable
  bool had_members_ = false;
  std::map<uint32_t, uint64_t> beating_;  // by rank: the last incarnation that gave a sign of life
  bool stopping_ = false;
  std::list<std::unique_ptr<Session>> sessions_;
  Stats stats_;

  struct Snapshots {
    mutable std::mutex mutex;
    std::condition_variable changed;
    // Guarded by mutex:
    bool is_wanted = false;
    bool stops = false;
    std::map<uint32_t, std::pair<uint64_t, uint64_t>> durable;  // by rank: incarnation and step
    uint64_t durable_step = 0;                                  // of steps that are made together

    std::mutex writing;  // one snapshot at a time
    std::thread thread;
  } snapshots_;
  std::thread watch_thread_;
};

}  // namespace muster::server
