// What a chunk and a table of a server have in common: pushes that are held, added, and made a step of.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "kernels/norm_sum.h"
#include "server/protocol/protocol.h"
#include "server/shard/image.h"
#include "server/shard/pushes.h"

namespace muster::server {

/// One chunk, or one stripe of a table. Thread-safe, but for what needs lock(): functions that say so, and what derived
/// classes keep beside.
class HeldSums : public Pushes {
 public:
  using Pushes::Pushes;
  virtual ~HeldSums() = default;
  HeldSums(const HeldSums&) = delete;
  HeldSums& operator=(const HeldSums&) = delete;

  /// As Pushes::hold, under lock(). Sums of the step that were made ahead no longer count.
  bool keep(uint32_t rank, uint64_t incarnation, const Portion& part, std::span<const int64_t> rows, Bytes values,
            std::shared_ptr<const void> owner);

  /// Adds what `members` pushed, ahead of the demand, if all of them did.
  void sum_early(uint64_t step, const std::vector<uint32_t>& members);

  /// The norm of the sums over `members`, or of the last step's where it is made: a slow member may still ask. Nothing
  /// where pushes are missing, the step is past, or was made of other members' pushes. Needs lock().
  std::optional<kernels::NormSum> norm_now(uint64_t step, const std::vector<uint32_t>& members);
  /// The same. Waits for pushes that may still come. Throws InvalidArgument where they are past; what
  /// Pushes::wait_for_pushes does.
  kernels::NormSum sum(uint64_t step, const std::vector<uint32_t>& members, Deadline deadline);

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
  /// The same for a checkpoint, beside an image that is under way. Of a stripe, whose rows are copied in the order of
  /// their numbers (HeldTable::copy_cut), it gives no tensors.
  virtual std::unique_ptr<Image> begin_cut() { return begin_image(); }
  /// Takes what `tensors` have of an image of it: those that the image gave, in their order, in this call or in
  /// several. Returns whether all came. Throws CheckpointError for another shape or dtype than the plan's.
  virtual bool restore(const Image::Facts& facts, const checkpoint::NamedTensors& tensors) = 0;
  /// Calls `take`, once, with lock() held: as soon as `step` is made, or now where it is. False where it is past.
  bool when_made(uint64_t step, std::function<void()> take);

 protected:
  /// Sums what `members` pushed in `step`, and returns the norm of the sums; all of them have.
  virtual kernels::NormSum add(uint64_t step, const std::vector<uint32_t>& members) = 0;
  /// Steps from the sums that add() left, or from what one worker gave.
  virtual void step(const Apply& apply, const WorkerSums* given) = 0;

  /// What an image says of the steps that are made. Needs lock(), as restore_steps.
  Image::Facts facts_of_steps() const;
  void restore_steps(const Image::Facts& facts);

 private:
  void add_once(uint64_t step, const std::vector<uint32_t>& members);
  void make(const Apply& apply);

  struct Summed {
    uint64_t step = 0;  // 0: none
    std::vector<uint32_t> members;
    kernels::NormSum norm;
  };

  // Guarded by lock():
  Summed summed_;                                             // what add() did last
  Summed made_;                                               // of the last step that was made together
  std::multimap<uint64_t, std::function<void()>> when_made_;  // by step
};

}  // namespace muster::server
