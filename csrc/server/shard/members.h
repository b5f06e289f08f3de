// The members of a job, as a server knows them: who is there, in which incarnation, and which steps each can push.
// Logic alone: time is an argument.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "server/protocol/protocol.h"

namespace muster::server {

/// Externally synchronised.
class Members {
 public:
  using Time = std::chrono::steady_clock::time_point;
  using Milliseconds = std::chrono::milliseconds;

  struct Rules {
    uint32_t workers = 1;  ///< ranks below are awaited from the beginning
    Milliseconds heartbeat{5'000};
    Milliseconds timeout{600'000};  ///< for awaited ranks that never came
  };

  /// A job begins: fences all members of the one before, whose ranks it returns, and awaits ranks below
  /// `rules.workers`. Nobody is awaited before the first one.
  std::vector<uint32_t> begin_anew(const Rules& rules, Time now);
  /// Those that have joined belong to a job that is over.
  void forget_joined();
  uint32_t workers() const noexcept { return rules_.workers; }

  /// The incarnation of a connection of `rank`; for `incarnation` 0 one that is greater than all before, and than
  /// `life` << 32. A greater one fences the old. Throws Fenced for one that was replaced or declared dead. A worker of
  /// another job is not the member of a snapshot that has its incarnation.
  uint64_t greet(uint32_t rank, uint64_t incarnation, uint64_t life, Time now, bool is_of_another_job = false);
  /// The incarnation that a rank has, or had; 0: none.
  uint64_t incarnation(uint32_t rank) const noexcept;

  /// Makes it a member whose first step is `step` + 1. No-op for a member, and for one that has left in good order.
  /// Throws Fenced as greet does.
  void join(uint32_t rank, uint64_t incarnation, uint64_t step, Time now);
  /// It is back, and has what it pushed from the step `first` on; or it joins, and has pushed nothing.
  void note_return(uint32_t rank, uint64_t incarnation, uint64_t first);
  /// Ranks that others expect, and that a restart made this server forget, have a heartbeat's time to show up. Once all
  /// of them are back, nobody unknown is awaited any more. Others that never came are not awaited.
  void await(const std::vector<uint32_t>& ranks, Time now);

  /// Throw Fenced as greet does; check_member also InvalidArgument for one that has not joined.
  void check(uint32_t rank, uint64_t incarnation) const { known(rank, incarnation); }
  void check_member(uint32_t rank, uint64_t incarnation) const;

  /// `step` was made by `ranks`: who had come in before it and is not among them was gone then, which a restart made
  /// this server forget.
  void note_makers(const std::vector<uint32_t>& ranks, uint64_t step);

  /// A sign of life. Throws Fenced as greet does, but for one that has left in good order.
  void touch(uint32_t rank, uint64_t incarnation, Time now);
  void leave(uint32_t rank, uint64_t incarnation);
  /// Declares dead who was silent for too long; returns their ranks. `since_last`: since the last call. Where that is
  /// long, this process or its machine stood still, and the time does not count as silence.
  std::vector<uint32_t> expire(Time now, Time::duration since_last = {});

  /// Live ranks, ascending, awaited ones included; as pushers(), until this object changes.
  const std::vector<uint32_t>& live() const;
  bool has_joined(uint32_t rank) const noexcept;
  /// Members that gave a sign of life since `since`, ascending.
  std::vector<uint32_t> present(Time since) const;
  /// Whether it came, and then left or was declared dead.
  bool is_gone(uint32_t rank) const noexcept;

  /// Live ranks that may push `step`.
  const std::vector<uint32_t>& pushers(uint64_t step) const;
  /// Whether a rank that has not pushed a step still may; without a rank, whether anybody may. Who was not heard of
  /// since a restart may, for a time.
  bool may_push(std::optional<uint32_t> rank, uint64_t step, Time now) const;
  /// Whether workers that this server forgot when it started again may still show up.
  bool awaits_unknown(Time now) const noexcept { return now < unknown_until_; }
  /// A live member of a snapshot that has not come back since: it may be busy with something else for long, and knows
  /// what came after the snapshot. Nothing where there is none. See note_return.
  std::optional<uint32_t> awaits_return() const noexcept;

  /// Whether one of `ranks` that came in before this worker is live, and may still say what `step` is made by.
  bool has_senior(uint32_t rank, const std::vector<uint32_t>& ranks, uint64_t step) const;

  /// Those that have joined, for a snapshot; and back: they, and workers that are not among them, then have a
  /// heartbeat's time to show up.
  struct Record {
    std::vector<uint32_t> ranks;
    std::vector<uint64_t> incarnations;
    std::vector<uint64_t> joined_at;
    std::vector<uint8_t> live;

    template <class M, class W>
    static void visit(M& m, W& w) {
      w.numbers(m.ranks, kMaxWorkers);
      w.numbers(m.incarnations, kMaxWorkers);
      w.numbers(m.joined_at, kMaxWorkers);
      w.numbers(m.live, kMaxWorkers);
    }
  };
  Record record() const;
  /// `awaits_all`: ranks below `workers` that are not in it are awaited as from the beginning. Throws CheckpointError
  /// for a record that no server wrote.
  void restore(const Record& record, bool awaits_all, Time now);

 private:
  struct Member {
    uint64_t incarnation = 0;
    uint64_t joined_at = 0;
    uint64_t first = 0;  // it can push steps from here on
    Time seen{};
    bool live = false;
    bool came = false;            // gave a sign of life
    bool joined = false;          // else awaited
    bool returned = false;        // see note_return
    bool is_of_snapshot = false;  // see awaits_return
    bool dead = false;            // this incarnation was declared dead, or left
    bool left = false;

    void give_sign(Time now) {
      seen = now;
      came = true;
    }
  };

  void configure(const Rules& rules, Time now);
  const Member& known(uint32_t rank, uint64_t incarnation) const;
  Member& known(uint32_t rank, uint64_t incarnation);
  const Member* find(uint32_t rank) const noexcept;
  /// Who is live, or may push, is about to change.
  void forget_lists() noexcept {
    live_.reset();
    pushers_.reset();
  }
  bool has_left(uint32_t rank, uint64_t incarnation) const noexcept;

  Rules rules_;
  std::map<uint32_t, Member> members_;
  Time unknown_until_{};
  std::set<uint32_t> expected_;  // see await
  // What was asked for last: each push and each commit asks, and members change rarely.
  mutable std::optional<std::vector<uint32_t>> live_;
  mutable std::optional<std::pair<uint64_t, std::vector<uint32_t>>> pushers_;  // and of which step
};

/// "worker 3"
std::string name_of_worker(uint32_t rank);

}  // namespace muster::server
