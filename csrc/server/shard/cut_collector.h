// What a server gathers for a snapshot: images of all its chunks and tables, of one step, taken while steps go on.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "server/shard/held_sums.h"
#include "server/shard/timekeeper.h"

namespace muster::server {

/// Thread-safe. Where steps are not made together there is nothing to gather: a snapshot is due `every` so often, and
/// where one is wanted.
class CutCollector {
 public:
  using Time = Timekeeper::Time;

  CutCollector(std::chrono::milliseconds every, Timekeeper& time);

  /// Images by member of a Shard.
  struct Cut {
    uint64_t step = 0;
    uint64_t keep = 0;  ///< see server::Cut
    std::vector<std::unique_ptr<Image>> images;
    size_t missing = 0;  ///< images that are not taken yet
    bool is_lost = false;
  };

  /// Begins one of a step, unless it is under way: it takes the place of one that is older. Each member gives its image
  /// when it has made the step. To be called before anybody makes the step. No-op for other members than begin_with's.
  void begin(const std::vector<HeldSums*>& members, uint64_t step, uint64_t keep);
  /// The same for who waits: null where it is not whole at the deadline, or a member has passed the step.
  using Take = std::unique_ptr<Image> (HeldSums::*)();
  std::shared_ptr<Cut> gather(const std::vector<HeldSums*>& members, uint64_t step, Time deadline,
                              Take take = &HeldSums::begin_image);

  /// A shard of these members is there, which must outlive it or what is gathered of them, and goes on from a snapshot
  /// or, `is_anew`, from nothing. Where steps are made together no snapshot is due by the time. Returns what was
  /// gathered and is given up: it is to be destroyed where no lock is held.
  [[nodiscard]] std::vector<std::unique_ptr<Image>> begin_with(const std::vector<HeldSums*>& members, bool are_together,
                                                               bool is_anew);
  /// All servers go on after `step`, and have it in snapshots. What was gathered is given up.
  void go_on_after(uint64_t step);
  /// After a restart: of this step is the snapshot before the newest one.
  void note_kept(uint64_t step);
  /// One is wanted soon: when as much time has passed since the last one as that took.
  void want();
  /// Where steps are not made together: a worker's log fills, and one is due at once. Who asks during a snapshot asks
  /// again after it, if that did not help.
  void hurry();
  /// One of now is wanted, though steps are made together: none will follow.
  void demand();

  /// False once stopped.
  bool wait_until_due();
  bool is_due() const;
  /// What is due: a cut that is whole, or null for a snapshot of now.
  std::shared_ptr<Cut> take();
  /// What was taken is written, or given up.
  void note_written();
  /// Waits before what cannot be written is tried again, longer after more failures; false once stopped, and where it
  /// is not to be tried again.
  bool pause(uint32_t failures);
  void let_retry(bool retries);
  /// What was gathered is given up: the members that it is of may go.
  void stop();

 private:
  using Lock = std::unique_lock<std::mutex>;

  void arm(const std::vector<HeldSums*>& members, const std::shared_ptr<Cut>& cut, Take take);
  bool due(Time now) const;
  Time next_look(Time now) const;

  Timekeeper& time_;
  const std::chrono::milliseconds every_;
  std::mutex arming_;  // held while members are told of a cut
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  const std::vector<HeldSums*>* members_ = nullptr;  // of the shard, to be compared alone
  std::shared_ptr<Cut> cut_;
  uint64_t begun_step_ = 0;  // of the last cut that was begun
  uint64_t keep_ = 0;        // see server::Cut
  uint64_t went_on_after_ = 0;
  bool only_cuts_ = false;
  bool is_wanted_ = false;
  bool is_urgent_ = false;
  bool is_demanded_ = false;
  bool retries_ = true;
  bool stops_ = false;
  Time begun_;  // the last snapshot
  Time ended_;
  Time::duration took_{};
};

}  // namespace muster::server
