// The logic of a parameter server: requests in, answers out. It has no threads, no sockets and no clock of its own; it
// knows no model: everything comes from the chief.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "net/channel.h"
#include "server/protocol/plan.h"
#include "server/protocol/protocol.h"
#include "server/shard/cut_collector.h"
#include "server/shard/dealer.h"
#include "server/shard/part_writer.h"
#include "server/shard/quorum.h"
#include "server/shard/saved.h"
#include "server/shard/server_snapshots.h"
#include "server/shard/session.h"
#include "server/shard/shard.h"
#include "server/shard/timekeeper.h"

namespace muster::server {

/// Thread-safe: many threads may give it requests, each of another session. docs/threading.md has its locks.
class ServerCore {
 public:
  using Time = Timekeeper::Time;

  /// `store`: null where no snapshots are kept, and what is applied counts as durable. `time` must outlive it. Throws
  /// CheckpointError for a store that is not a parameter server's.
  ServerCore(std::unique_ptr<SnapshotStore> store, std::chrono::milliseconds snapshot_every, Timekeeper& time);
  ~ServerCore();
  ServerCore(const ServerCore&) = delete;
  ServerCore& operator=(const ServerCore&) = delete;

  /// Takes up the newest good snapshot, if there is one; once, at first. Requests are answered by Busy until then.
  /// Throws CheckpointError where none is good.
  void restore();

  /// Requests that wait, and later ones that would, fail.
  void stop();

  /// Sessions whose requests may come, until detach().
  void attach(Session& session);
  void detach(Session& session);

  /// Answers one request on its session's channel; may wait for others by Timekeeper::wait, and be repeated where that
  /// throws. Never throws for what a worker asks: refusals are answers. Throws CommError where the channel is broken.
  void answer(Session& session, net::Frame& frame);

  /// Declares workers dead; to be called often. `since_last`: since the last call.
  void expire(Time::duration since_last);

  /// Waits until a snapshot is due; false once stopped.
  bool wait_for_snapshot() { return cuts_.wait_until_due(); }
  bool is_snapshot_due() const { return cuts_.is_due(); }
  /// Writes what is due. Never throws: it is tried again later, and workers are told.
  void keep_snapshot() noexcept;
  /// Writes one of now, unless the newest is, and waits for it. No-op before Start and where none are kept. Throws
  /// CheckpointError. What keep_snapshot() cannot write is not tried again meanwhile.
  void snapshot();

  /// Waits until a part of a checkpoint is to be written; false once stopped.
  bool wait_for_part() { return parts_.wait(); }
  /// Writes it. Never throws: the chief is told in the checkpoint's draft.
  void keep_part() noexcept { parts_.write(); }

  /// True once workers have joined and all of them have left or died.
  bool is_deserted() const;

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
  using Lock = std::unique_lock<std::mutex>;
  /// Gives up at the first failure.
  static constexpr auto kOnce = [](uint32_t /*failures*/) { return false; };

  void dispatch(Session& session, net::Frame& frame);
  // Each answers on the session's channel.
  void greet(Session& session, const Hello& hello);
  void configure(Session& session, const Configure& request);
  void await_job(const Session& session, const Configure& request);
  void check_not_ahead(const Session& session, const Join& request);
  void inquire(Session& session);
  void start(Session& session, const Start& request);
  void resume(Session& session, const Resume& request);
  void join(Session& session, const Join& request, Time deadline);
  void beat(Session& session, Shard& shard, const Beat& request);
  void leave(Session& session, Shard& shard);
  void write(Session& session, net::Frame& frame);
  void read(Session& session, Shard& shard, const Read& request, Time deadline);
  void send_values(Session& session, Shard& shard, const Read& request, Time deadline);
  void hold(Session& session, Shard& shard, const Push& request, net::Frame& frame);
  void commit(Session& session, const Commit& request, Time deadline);
  void recall(Session& session, const Decision& decision);
  void deal(Session& session, const Deal& request, Time deadline);
  void tell_passes(Session& session, Time deadline);
  void sum(Session& session, Shard& shard, const Sum& request, Time deadline);
  void apply(Session& session, Shard& shard, const Apply& request, Time deadline);
  void write_part(Session& session, const WritePart& request);
  /// What the others step by in a synchronous step, where one of them came in before this worker; else null.
  std::shared_ptr<const Apply> await_seniors(const Session& session, Shard& shard, const Apply& request, Time deadline);
  /// False where the frame is about something else than rows.
  bool answer_rows(Session& session, Shard& shard, net::Frame& frame, Time deadline);
  void hold_rows(Session& session, Shard& shard, const PushRows& request, net::Frame& frame);
  void pull_rows(Session& session, TableShard& tables, const PullRows& request, net::Bytes payload, Time deadline);

  Time reply_deadline() const { return time_.now() + std::chrono::seconds(60); }  // of a worker that reads
  template <class Message>
  void reply(Session& session, const Message& message, std::span<const net::Bytes> payload = {}) {
    session.channel->send(Message::kType, encode(message), payload, reply_deadline());
  }
  /// Where values go that a worker asked for: into memory that it shares, or to be sent. Throws InvalidArgument.
  static std::byte* place_for(Session& session, bool shares, uint64_t place, size_t bytes);
  /// Counts a push; returns who pushes this step, where it may be time to add.
  std::vector<uint32_t> note_push(const Shard& shard, uint64_t step, bool is_fresh);
  static void check_members(const std::vector<uint32_t>& members);
  static void check_step(uint64_t step);
  /// What the chief of the session's job writes to. Throws InvalidArgument for values that were trained.
  std::shared_ptr<Shard> begin_writing(const Session& session);
  Quorum::Rules rules_of(const Plan& plan) const;

  // With mutex_:
  /// Of server 0: whether no worker is awaited that knows more than this server, which started again.
  bool is_up_to_date() const;
  void await_all_back(Lock& lock, Time deadline);
  std::string lacks_return() const;
  /// Ends the job before, and returns whom that fences.
  std::vector<uint32_t> begin_job(const Session& session, const Configure& request);
  bool is_untouched(const std::shared_ptr<Shard>& shard) const;
  /// What was held for an earlier job, and images of that: to be destroyed without mutex_.
  struct Former {
    Former() = default;
    Former(Former&&) = default;
    Former& operator=(Former&&) = default;
    ~Former();

    std::shared_ptr<Shard> shard;
    std::vector<std::unique_ptr<Image>> images;
  };
  Former replace_shard(const Plan& plan);
  /// Gives up what there is, for values that the chief will write.
  Former give_up(const Configure& request);
  /// The chief of this job writes: what that of an earlier one wrote, and nobody trained, is given up.
  Former take_over_values();
  /// A worker came to a job that goes on, and that this server may have forgotten.
  void take_up_job(const Session& session, const Configure& request);
  void close_channels(const std::vector<uint32_t>& ranks);
  void check_free() const;
  /// Throw Fenced for a connection of a job that another one has ended, and for a chief whose values are not this
  /// job's.
  void check_job(const Session& session) const;
  void check_origin(const Session& session) const;
  std::vector<uint32_t> present() const;

  std::shared_ptr<Shard> make_shard(const Plan& plan, uint32_t server);
  /// Throws CheckpointError for one that another took the place of.
  void check_current(const std::shared_ptr<Shard>& shard) const;
  std::shared_ptr<Shard> shard() const;
  uint32_t index_of_server() const;
  Durable durable(const Session& session, Shard& shard) const;
  bool is_safe(const Session& session, Shard& shard, uint64_t last) const;
  /// The least and the greatest step that a chunk or table has made.
  static std::pair<uint64_t, uint64_t> made_by(Shard& shard);
  /// Takes up a snapshot, for the job of that chief, which is checked once it is read; null: for the job that wrote it,
  /// with who took part.
  void take(const ServerSnapshots::Source& source, const Session* chief);
  Saved saved_now(Shard& shard) const;
  /// The step that a snapshot of now is of.
  uint64_t step_to_keep(Shard& shard) const;
  /// `at_least`: all servers hold what came of this step.
  void snapshot(const ServerSnapshots::Pause& pause, bool even_if_kept = false, uint64_t at_least = 0);
  void write_cut(const std::shared_ptr<Shard>& shard, CutCollector::Cut& cut, const ServerSnapshots::Pause& pause);

  Timekeeper& time_;
  const std::chrono::milliseconds snapshot_every_;
  ServerSnapshots snapshots_;
  const uint64_t life_;
  CutCollector cuts_;
  PartWriter parts_;
  std::atomic<bool> is_restored_{false};

  std::mutex resuming_;  // held by who lets the job go on
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // a start, a decision, a snapshot, the end
  // Guarded by mutex_:
  Quorum quorum_;
  Dealer dealer_;
  std::shared_ptr<Shard> shard_;  // null before Configure
  uint32_t index_ = 0;            // of this server
  struct Job {
    uint64_t id = 0;
    std::string facts;
    std::string token;
    bool is_told = true;     // false: it began after another one, and nobody said yet where it goes on
    bool is_settled = true;  // that is in a snapshot, too
  } job_;
  struct {
    bool are_there = false;    // initial ones, or later ones
    bool are_durable = false;  // likewise: the job has started
    uint64_t origin = 0;       // see Configured
    bool gave_up = false;      // those of an earlier job, for others that are not durable yet
  } values_;
  struct {
    bool had_any = false;
    bool awaited_unknown = false;  // when expire() looked last
  } members_;
  bool stopping_ = false;
  std::list<Session*> sessions_;
  Stats stats_;
};

}  // namespace muster::server
