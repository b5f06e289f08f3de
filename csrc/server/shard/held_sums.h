// What a chunk and a table of a server have in common: pushes that are held, added, and made a step of.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "server/protocol/protocol.h"
#include "server/shard/pushes.h"

namespace muster::server {

/// One chunk or table. Thread-safe, but for what needs lock(): functions that say so, and what derived classes keep
/// beside.
class HeldSums : public Pushes {
 public:
  using Pushes::Pushes;
  virtual ~HeldSums() = default;
  HeldSums(const HeldSums&) = delete;
  HeldSums& operator=(const HeldSums&) = delete;

  /// As Pushes::hold, under lock(). Sums of the step that were made ahead no longer count.
  bool keep(uint32_t rank, uint64_t incarnation, const Portion& part, const std::vector<int64_t>& rows, Bytes values,
            std::shared_ptr<const void> owner);

  /// Adds what `members` pushed, ahead of the demand, if all of them did.
  void sum_early(uint64_t step, const std::vector<uint32_t>& members);

  /// Statistics of a step's sums.
  struct Statistics {
    uint64_t step = 0;             ///< 0: none
    std::vector<int64_t> rows;     ///< of a table
    std::vector<double> partials;  ///< of a chunk, by tile; of a table, by row and tile. See kernels::grad_stats
  };
  /// Those of the sums over `members`, or of the last step where it is made: a slow member may still ask. Waits for
  /// pushes that may still come. `lock` is lock(), held. Throws InvalidArgument where the step is past.
  const Statistics& sum(Lock& lock, uint64_t step, const std::vector<uint32_t>& members, Deadline deadline);

  /// lock(), once `at_least` steps are made. Helps with a step that is being applied. Throws Timeout at the deadline.
  Lock lock_after(uint64_t at_least, Deadline deadline);

  /// Makes a step that is made together; returns once it is.
  void apply_together(const Apply& apply, Deadline deadline);
  /// The same where all of its members' pushes are here; else returns false. Needs lock().
  bool apply_whole(const Apply& apply);
  /// Makes the step of one worker, once, from what it pushed. Needs lock().
  void apply_alone(uint32_t rank, uint64_t incarnation, const Apply& apply);

  /// See Shard::skip_to. `command`: of that step, or null.
  bool skip_to(uint64_t step, const Apply* command);

 protected:
  /// Sums what `members` pushed in `step` and writes the statistics; all of them have.
  virtual void add(uint64_t step, const std::vector<uint32_t>& members, Statistics& statistics) = 0;
  /// Steps from the sums that add() left, or from what one worker gave.
  virtual void step(const Apply& apply, const WorkerSums* given) = 0;

  /// Those that add() wrote last.
  const Statistics& summed() const noexcept { return summed_; }
  /// The last step's, where that was made together and is the newest; else null.
  const Statistics* made() const noexcept { return made_.step != 0 && made_.step == steps() ? &made_ : nullptr; }
  void restore(const Record& record, Statistics made);

 private:
  void add_once(uint64_t step, const std::vector<uint32_t>& members);
  void make(const Apply& apply, const std::vector<uint32_t>& members);

  // Guarded by lock():
  std::vector<uint32_t> summed_members_;
  Statistics summed_;  // of summed_members_
  Statistics made_;    // of the last step
};

}  // namespace muster::server
