// A pass over a loader whose batches this worker does not have for itself: parameter servers deal them, or live workers
// divide them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "server/protocol/protocol.h"

namespace muster::detail {

/// What became of the window that a step belongs to.
enum class WindowEnd : uint8_t { still_open, closed, dropped };

/// Decides which batches this worker reads. Numbers are this worker's own. Owned by the thread that iterates and steps.
class LoaderPass {
 public:
  virtual ~LoaderPass() = default;

  /// A number for the batch that is to be read next; empty where wait_for_more() decides.
  virtual std::optional<int64_t> next() = 0;
  /// The loop gets this batch.
  virtual void yielded(int64_t number) = 0;
  /// This batch could not be read: nobody is to try again.
  virtual void lost(int64_t number) = 0;
  /// The loop is through with the batch that it got.
  virtual void done() = 0;
  /// Whether there are more to read, once all that next() gave were yielded; may wait for other workers.
  virtual bool wait_for_more() = 0;

  /// The batch that the loop got goes into a step; its name where servers dealt it.
  virtual std::optional<server::BatchId> begin_step() = 0;
  /// A step ended, of this pass's batch or not. `members`: the ranks, ascending, of whose parts a closed window is.
  virtual void end_step(WindowEnd window, const std::vector<uint32_t>& members) = 0;

  /// Made once: the loop keeps it while it iterates.
  std::shared_ptr<void> hold() {
    auto hold = std::make_shared<char>();
    hold_ = hold;
    return hold;
  }
  /// Whether no loop holds the pass any more.
  bool is_left() const noexcept { return hold_.expired(); }

 private:
  std::weak_ptr<void> hold_;
};

}  // namespace muster::detail
