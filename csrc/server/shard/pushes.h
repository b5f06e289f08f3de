// Pushes of a chunk or of a table that wait for their step, and the steps that are made, so that each push counts once.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "server/protocol/protocol.h"
#include "server/shard/event_count.h"
#include "server/shard/timekeeper.h"

namespace muster::server {

/// The rules and the commands of steps, common to all chunks and tables of a server. Thread-safe.
class Steps {
 public:
  /// Tells whether a rank that has not pushed a step still may; without a rank, whether anybody may. Called with a
  /// chunk's or a table's mutex held.
  using MayPush = std::function<bool(std::optional<uint32_t> rank, uint64_t step)>;

  Steps(bool is_synchronous, MayPush may_push, Timekeeper& time)
      : is_synchronous(is_synchronous), may_push(std::move(may_push)), time(time) {}

  /// Of a synchronous job: everybody's command of a step, where it is the newest; else null.
  std::shared_ptr<const Apply> command_of(uint64_t step) const;
  /// The newest one; null before the first.
  std::shared_ptr<const Apply> command() const;
  /// Throws Fenced while the steps are closed, CheckpointError where the step's command was another one: parts of it
  /// were made of others' pushes.
  void note_command(const Apply& command);
  uint64_t commanded() const;

  /// Refuses commands that are not known yet: a job ends.
  void close();
  /// Takes commands again, of the steps after `step`.
  void open(uint64_t step);

  const bool is_synchronous;
  const MayPush may_push;
  Timekeeper& time;
  std::atomic<int64_t> held_bytes{0};  ///< of pushes
  std::atomic<bool> stopped{false};    ///< waiting calls, and later ones that would wait, throw CommError

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const Apply> command_;  // guarded by mutex_
  bool is_closed_ = false;                // likewise
};

/// One worker's sums of a step.
struct WorkerSums {
  /// Of a chunk: the only part. Of a table: its values are of `rows` rows.
  struct Pushed {
    size_t rows = 0;
    Bytes values;
    std::shared_ptr<const void> owner;  ///< keeps them alive
  };
  uint64_t incarnation = 0;
  uint32_t num_parts = 1;
  std::vector<Pushed> parts;  ///< those that came
  std::vector<int64_t> rows;  ///< of all parts, strictly ascending
  int64_t bytes = 0;

  bool is_whole() const noexcept { return parts.size() == num_parts; }
};

/// Of one chunk, or one stripe of a table. Externally synchronised by lock(), which the owner also guards its own by;
/// wait() and the like release it meanwhile. steps(), step_of() and wake() do without, so that who only asks how far it
/// is, or has news for those who wait, does not wait for a step.
class Pushes {
 public:
  using Lock = std::unique_lock<std::mutex>;

  /// Steps of one worker that are held at once, at most.
  static constexpr size_t kMaxHeld = 4;

  explicit Pushes(Steps& rules) : rules_(rules) {}

  Lock lock() { return Lock(mutex_); }
  Lock try_lock() { return {mutex_, std::try_to_lock}; }
  uint64_t steps() const noexcept { return steps_; }

  /// Which of the `count` parts that a push comes in.
  struct Portion {
    uint64_t step = 0;
    uint32_t index = 0;
    uint32_t count = 1;
  };
  /// Keeps a part of a push until the step is made. False: it is held or applied already, or was dropped. Throws
  /// InvalidArgument, and changes nothing, above kMaxHeld, for a part that is not the next one, and for rows that do
  /// not ascend.
  bool hold(uint32_t rank, uint64_t incarnation, const Portion& part, std::span<const int64_t> rows, Bytes values,
            std::shared_ptr<const void> owner);
  /// What hold() would return or throw.
  bool would_hold(uint32_t rank, uint64_t incarnation, const Portion& part, std::span<const int64_t> rows) const;

  /// A rank's sums of a step; null where not all of them are there.
  const WorkerSums* find(uint64_t step, uint32_t rank) const;
  /// Whether `step` is the next one and all of them gave theirs.
  bool has_all(uint64_t step, const std::vector<uint32_t>& ranks) const;

  /// Until `at_least` steps are made: then returns null. A command that would make them is returned instead, for the
  /// caller to help. Throws as wait_for_pushes does.
  std::shared_ptr<const Apply> wait_for_steps(Lock& lock, uint64_t at_least, Deadline deadline);
  /// Until the step before is made, and every member's push is there. False: the step is made already. Throws
  /// CheckpointError where one can never come, since nobody who lives has it; Timeout at the deadline.
  bool wait_for_pushes(Lock& lock, uint64_t step, const std::vector<uint32_t>& members, Deadline deadline);

  /// Steps that are made together: `step` is, and those before.
  void note_made(uint64_t step);

  /// Where they are not: what a worker's step is made of; null where it is made. Throws InvalidArgument where not all
  /// of it is held. note_applied marks the step as made.
  const WorkerSums* find_own(uint32_t rank, uint64_t incarnation, uint64_t step);
  void note_applied(uint32_t rank, uint64_t incarnation, uint64_t step);
  /// Drops what a worker's incarnations up to this one pushed and nobody will apply, and holds nothing of theirs.
  void drop(uint32_t rank, uint64_t incarnation);
  /// Drops what anybody pushed.
  void drop_all();

  /// The last step that was applied whole: of the worker's incarnation, where steps are not made together.
  uint64_t step_of(uint32_t rank, uint64_t incarnation) const;

  /// Makes who waits look again.
  void wake() { events_.notify_all(); }

  /// What is applied, for snapshots.
  struct Record {
    uint64_t steps = 0;
    std::vector<uint32_t> ranks;  ///< where steps are not made together: whose pushes are in it, up to which step
    std::vector<uint64_t> incarnations;
    std::vector<uint64_t> applied;

    template <class M, class W>
    static void visit(M& m, W& w) {
      w.number(m.steps);
      w.numbers(m.ranks, kMaxWorkers);
      w.numbers(m.incarnations, kMaxWorkers);
      w.numbers(m.applied, kMaxWorkers);
    }
  };
  Record record() const;
  void restore(const Record& record);

 private:
  struct Mark {
    uint64_t incarnation = 0;
    uint64_t step = 0;
  };
  using SumsByRank = std::map<uint32_t, WorkerSums>;  // by rank

  void wait(Lock& lock, Deadline deadline, const std::string& what, const std::function<bool()>& ready);
  bool is_applied(uint32_t rank, uint64_t incarnation, uint64_t step) const;
  /// Of steps that are made together: nobody is left who could bring the next one.
  bool is_stuck() const { return !rules_.may_push({}, steps_ + 1); }
  /// Throws CheckpointError for the steps up to `last`, which this server lacks.
  [[noreturn]] void refuse_to_go_on(uint64_t last) const;

  Steps& rules_;
  std::mutex mutex_;
  EventCount events_;  // what is awaited may have come
  // Written with mutex_:
  std::atomic<uint64_t> steps_{0};
  mutable std::mutex marks_mutex_;
  std::map<uint32_t, Mark> marks_;        // by rank; where steps are not made together. Written with marks_mutex_, too
  std::map<uint64_t, SumsByRank> held_;   // by step
  std::map<uint32_t, uint64_t> dropped_;  // by rank: the last incarnation of which nothing is held
};

}  // namespace muster::server
