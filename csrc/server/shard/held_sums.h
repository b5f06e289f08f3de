// What a chunk and a table of a server have in common: pushes that are held, added, and made a step of.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "server/protocol/protocol.h"
#include "server/shard/image.h"
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
  /// pushes that may still come. `lock` is lock(), held. Throws InvalidArgument where the step is past, or was made of
  /// other members' pushes; what Pushes::wait_for_pushes does.
  const Statistics& sum(Lock& lock, uint64_t step, const std::vector<uint32_t>& members, Deadline deadline);

  /// lock(), once `at_least` steps are made. Helps with a step that is being applied. Throws Timeout at the deadline.
  Lock lock_after(uint64_t at_least, Deadline deadline);

  /// Makes a step that is made together; returns once it is. Throws what Pushes::wait_for_pushes does.
  void apply_together(const Apply& apply, Deadline deadline);
  /// The same where all of its members' pushes are here; else returns false. Needs lock().
  bool apply_whole(const Apply& apply);
  /// Makes the step of one worker, once, from what it pushed. Needs lock().
  void apply_alone(uint32_t rank, uint64_t incarnation, const Apply& apply);

  /// Whether the step is made, or is now, by this command, where it is the next one and all parts are here.
  bool settle(const Apply& command);

  /// Begins an image of all that is held but for pushes, as it is. Needs lock(); the image does not.
  virtual std::unique_ptr<Image> begin_image() = 0;
  /// Takes what `tensors` have of an image of it: those that the image gave, in their order, in this call or in
  /// several. Returns whether all came. Throws CheckpointError for another shape or dtype than the plan's.
  virtual bool restore(const Image::Facts& facts, const checkpoint::NamedTensors& tensors) = 0;
  /// Calls `take`, once, with lock() held: as soon as `step` is made, or now where it is. False where it is past.
  bool when_made(uint64_t step, std::function<void()> take);

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
  void make(const Apply& apply);

  // Guarded by lock():
  std::vector<uint32_t> summed_members_;
  Statistics summed_;  // of summed_members_
  std::vector<uint32_t> made_members_;
  Statistics made_;                                           // of the last step, over made_members_
  std::multimap<uint64_t, std::function<void()>> when_made_;  // by step
};

}  // namespace muster::server
