// The quorum of a job: who takes part in it, and when a step may go on. Logic alone: time is an argument.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "server/protocol/protocol.h"

namespace muster::server {

/// Every server knows the members; commits and decisions are server 0's business. Externally synchronised.
class Quorum {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Milliseconds = std::chrono::milliseconds;

  struct Rules {
    uint32_t workers = 1;  ///< ranks below are awaited from the beginning
    uint32_t staleness = 0;
    Milliseconds heartbeat{5'000};
    Milliseconds timeout{600'000};  ///< for awaited ranks that never came
  };

  /// Nobody is awaited before configure().
  Quorum() = default;
  void configure(const Rules& rules, Time now);

  /// A job that begins anew: fences all members, whose ranks it returns, and awaits ranks below `rules.workers`. Steps
  /// are counted on.
  std::vector<uint32_t> begin_anew(const Rules& rules, Time now);
  uint32_t workers() const noexcept { return rules_.workers; }

  /// The incarnation of a connection of `rank`; for `incarnation` 0 one that is greater than all before (and than those
  /// that a clock gave before a restart). A greater one fences the old: its commit is forgotten. Throws Fenced for one
  /// that was replaced or declared dead.
  uint64_t greet(uint32_t rank, uint64_t incarnation, Time now);

  /// Makes it a member whose first step is `step` + 1; at server 0 `step` is what `first_step` says.
  void join(uint32_t rank, uint64_t incarnation, uint64_t step, Time now);
  /// The step after which a worker that joins comes in: the last decided one; where steps are not decided together, the
  /// slowest member's.
  uint64_t step_of_joiner() const;
  /// Steps that are made together count on from `step` at the least. Of a job in which nobody has taken part yet.
  void begin_at(uint64_t step);

  /// Throws Fenced as greet does.
  void check(uint32_t rank, uint64_t incarnation) { known(rank, incarnation); }

  /// A sign of life. Throws Fenced as greet does.
  void touch(uint32_t rank, uint64_t incarnation, Time now);
  void leave(uint32_t rank, uint64_t incarnation);
  /// Declares dead who was silent for too long; returns their ranks. `since_last`: since the last call. Where that is
  /// long, this process or its machine stood still, and the time does not count as silence.
  std::vector<uint32_t> expire(Time now, Time::duration since_last = {});

  /// Live ranks, ascending, awaited ones included.
  std::vector<uint32_t> live() const;
  /// Whether this incarnation takes part.
  bool is_member(uint32_t rank, uint64_t incarnation) const;
  /// Whether it came, and then left or was declared dead.
  bool is_gone(uint32_t rank) const;
  /// Whether a worker rests: its pass over the data has ended, or it waits for batches that others have. Nobody waits
  /// for its steps until it is dealt a batch or commits a step; it then counts as having kept up with the slowest.
  void note_rests(uint32_t rank, uint64_t incarnation, bool rests);
  struct Progress {
    uint64_t own = 0;      ///< the last step that the member has committed, and those it was excused from in its rests
    uint64_t slowest = 0;  ///< the last step that all live members have committed, but for those who rest
  };
  Progress progress(uint32_t rank) const;
  /// Live ranks that may push `step`.
  std::vector<uint32_t> pushers(uint64_t step) const;
  bool may_push(uint32_t rank, uint64_t step) const;

  /// Whether one of `members` that came in before this worker is live.
  bool has_senior(uint32_t rank, const std::vector<uint32_t>& members) const;

  /// Repeating a commit changes nothing. Throws InvalidArgument for a step that is past, LayoutMismatch where members
  /// commit different counts of numbers.
  void commit(uint32_t rank, uint64_t incarnation, const Commit& commit);
  /// What the worker's commit waits for, once it is known.
  std::optional<Decision> decision(uint32_t rank, uint64_t step) const;
  /// Who the worker's commit still waits for, in words.
  std::string missing(uint32_t rank, uint64_t step) const;

  /// What a member remembers of a decision that this server may have forgotten.
  void recall(const Decision& decision);

  /// Members and clocks, for a snapshot; and back: members then have a heartbeat's time to show up.
  struct Record {
    std::vector<uint32_t> ranks;
    std::vector<uint64_t> incarnations;
    std::vector<uint64_t> joined_at;
    std::vector<uint64_t> clocks;
    std::vector<uint64_t> excused;
    std::vector<uint8_t> live;
    std::vector<uint8_t> rests;
    Decision decision;

    template <class M, class W>
    static void visit(M& m, W& w) {
      w.numbers(m.ranks, kMaxWorkers);
      w.numbers(m.incarnations, kMaxWorkers);
      w.numbers(m.joined_at, kMaxWorkers);
      w.numbers(m.clocks, kMaxWorkers);
      w.numbers(m.excused, kMaxWorkers);
      w.numbers(m.live, kMaxWorkers);
      w.numbers(m.rests, kMaxWorkers);
      visit_value(m.decision, w);
    }
  };
  Record record() const;
  void restore(const Record& record, Time now);

 private:
  struct Member {
    uint64_t incarnation = 0;
    uint64_t joined_at = 0;
    uint64_t clock = 0;    // the last step that is committed
    uint64_t excused = 0;  // steps of the slowest while this one rested
    Time seen{};
    bool live = false;
    bool came = false;             // gave a sign of life
    bool joined = false;           // else awaited
    bool rests = false;            // see note_rests
    bool dead = false;             // this incarnation was declared dead, or left
    std::optional<Commit> commit;  // of step `clock`, undecided

    uint64_t progress() const { return clock + excused; }
    void give_sign(Time now) {
      seen = now;
      came = true;
    }
  };

  Member& known(uint32_t rank, uint64_t incarnation);
  uint64_t slowest() const;
  void resume(Member& member) const;
  bool may_go_on(const Member& member, uint64_t step) const;
  void try_to_decide();

  Rules rules_;
  std::map<uint32_t, Member> members_;
  Decision decided_;
};

}  // namespace muster::server
