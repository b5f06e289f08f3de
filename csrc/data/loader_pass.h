// What decides which batches of a pass this worker reads, where workers may die.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

namespace muster::detail {

/// Owned by the thread that iterates and steps.
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

  /// Made once: what the loop holds while it iterates.
  std::shared_ptr<void> hold() {
    auto hold = std::make_shared<char>();
    hold_ = hold;
    return hold;
  }
  /// Whether no loop holds it any more.
  bool is_left() const noexcept { return hold_.expired(); }

 private:
  std::weak_ptr<void> hold_;
};

}  // namespace muster::detail
