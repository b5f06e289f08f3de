// The quorum of a job: when a step may go on. Logic alone: time is an argument.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "server/protocol/protocol.h"
#include "server/shard/cut_schedule.h"
#include "server/shard/members.h"

namespace muster::server {

/// Every server knows the members; commits and decisions are server 0's business. Externally synchronised.
class Quorum {
 public:
  using Time = Members::Time;
  using Milliseconds = Members::Milliseconds;

  struct Rules {
    Members::Rules members;
    uint32_t staleness = 0;
    Milliseconds cut_every{30'000};  ///< between two snapshots of one step
  };

  /// Nobody is awaited before configure().
  Quorum() = default;
  void configure(const Rules& rules, Time now);

  const Members& members() const noexcept { return members_; }
  Members& members() noexcept { return members_; }
  CutSchedule& cuts() noexcept { return cuts_; }

  /// As Members::begin_anew. Steps are counted on.
  std::vector<uint32_t> begin_anew(const Rules& rules, Time now);

  /// As the functions of Members; what a worker that is gone has committed is forgotten.
  uint64_t greet(uint32_t rank, uint64_t incarnation, uint64_t life, Time now, bool is_of_another_job = false);
  void leave(uint32_t rank, uint64_t incarnation, Time now);
  std::vector<uint32_t> expire(Time now, Time::duration since_last = {});

  /// Makes it a member whose first step is `step` + 1; at server 0 `step` is what step_of_joiner() says.
  void join(uint32_t rank, uint64_t incarnation, uint64_t step, Time now);
  /// The step after which a worker that joins comes in: the last decided one; where steps are not decided together, the
  /// slowest member's.
  uint64_t step_of_joiner() const;
  /// Steps that are made together count on from `step`. Of a job in which nobody has taken part yet.
  void begin_at(uint64_t step);

  /// Whether a worker rests: its pass over the data has ended, or it waits for batches that others have. Nobody waits
  /// for its steps until it is dealt a batch or commits a step; it then counts as having kept up with the slowest.
  void note_rests(uint32_t rank, uint64_t incarnation, bool rests);
  struct Progress {
    uint64_t own = 0;      ///< the last step that the member has committed, and those it was excused from in its rests
    uint64_t slowest = 0;  ///< the last step that all live members have committed, but for those who rest
  };
  Progress progress(uint32_t rank) const;

  /// Repeating a commit changes nothing. Throws Fenced where the step was decided without the worker, InvalidArgument
  /// for one that is past, LayoutMismatch where members commit different counts of numbers.
  void commit(uint32_t rank, uint64_t incarnation, const Commit& commit, Time now);
  /// Decides where all have committed, and nobody who was forgotten by a restart is awaited any more.
  void try_to_decide(Time now);
  /// What the worker's commit waits for, once it is known; else null. Where steps are decided together it is one for
  /// all.
  std::shared_ptr<const Decision> decision(uint32_t rank, uint64_t step) const;
  /// The same as a message.
  std::shared_ptr<const std::string> encoded_decision(uint32_t rank, uint64_t step);
  /// Who the worker's commit still waits for, in words.
  std::string missing(uint32_t rank, uint64_t step) const;

  /// What a member remembers of a decision that this server may have forgotten, and whom it expects since.
  void recall(const Decision& decision, Time now);
  /// One that came in after `step` is back, and has made no decided step since.
  void recall(uint64_t step);

  /// For a snapshot, and back.
  struct Record {
    Members::Record members;
    std::vector<uint64_t> clocks;  ///< by member
    std::vector<uint64_t> excused;
    std::vector<uint8_t> rests;
    Decision decision;

    template <class M, class W>
    static void visit(M& m, W& w) {
      Members::Record::visit(m.members, w);
      w.numbers(m.clocks, kMaxWorkers);
      w.numbers(m.excused, kMaxWorkers);
      w.numbers(m.rests, kMaxWorkers);
      visit_value(m.decision, w);
    }
  };
  Record record() const;
  /// Throws CheckpointError for a record that no server wrote.
  void restore(const Record& record, Time now);

 private:
  struct Pace {
    uint64_t clock = 0;            // the last step that is committed
    uint64_t excused = 0;          // steps of the slowest while this one rested
    bool rests = false;            // see note_rests
    std::optional<Commit> commit;  // of step `clock`, undecided

    uint64_t progress() const { return clock + excused; }
  };

  void take(const Decision& decision);

  /// A rank's commit of an undecided step; null where there is none.
  const Commit* commit_of(uint32_t rank) const;
  /// Whether a member's commit is awaited by the others'.
  bool lacks_commit(uint32_t rank) const;
  uint64_t slowest() const;
  void resume(Pace& pace) const;
  bool may_go_on(const Pace& pace, uint64_t step) const;
  void forget(uint32_t rank, Time now);

  Rules rules_;
  Members members_;
  CutSchedule cuts_;
  std::map<uint32_t, Pace> paces_;  // by rank
  std::shared_ptr<const Decision> decided_ = std::make_shared<Decision>();
  std::shared_ptr<const Decision> encoded_;  // the last one that was, mostly for others to come
  std::shared_ptr<const std::string> encoding_;
  // Ranks to look at before all others, so that a commit costs the same among many workers:
  uint32_t awaited_ = 0;       // whose commit was missing
  uint32_t other_commit_ = 0;  // who committed an undecided step
};

}  // namespace muster::server
