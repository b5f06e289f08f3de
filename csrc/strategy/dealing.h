// Batches that parameter servers deal, whole and in order, to whichever worker asks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "server/protocol.h"
#include "strategy/strategy_core.h"

namespace muster::detail {

/// This worker's share of one pass over a loader. A batch that went into a step is finished by that step; any other
/// when the loop asks for the one after it. What reaches a server throws as ServerWindow. Owned by the thread that
/// iterates and steps.
class Dealing {
 public:
  /// Of the `loader`-th of the strategy, whose pass has `batches` on every worker.
  Dealing(std::shared_ptr<StrategyCore> core, int loader, int64_t epoch, int64_t batches);

  /// The number of a batch that was dealt and is to be read; empty where there is none for now.
  std::optional<int64_t> next();
  /// The loop gets this batch.
  void yielded(int64_t number) { current_ = number; }
  /// This batch could not be read: nobody else is to try.
  void lost(int64_t number);
  /// The loop is through with the batch that it got.
  void done();

  /// The batch that the loop got; none once it went into a step.
  std::vector<server::BatchId> current() const;
  /// It went into a step, which ended its window or not.
  void stepped(bool ended);

  /// Whether there are more to read. Waits while other workers may leave some, calling WaitHook; throws Timeout after
  /// the strategy's.
  bool wait_for_more();

  /// Made once: what the loop holds while it iterates.
  std::shared_ptr<void> hold();
  /// Whether no loop holds it any more.
  bool is_left() const noexcept { return hold_.expired(); }
  /// Gives back what is not finished, if the pass has not ended: other workers may wait for it.
  void leave();
  bool has_ended() const noexcept { return ended_; }

 private:
  std::optional<int64_t> ask();

  std::shared_ptr<StrategyCore> core_;
  uint32_t loader_;
  uint64_t epoch_;
  uint64_t batches_;
  std::weak_ptr<void> hold_;
  std::optional<int64_t> waited_for_;  // dealt at the end of a wait, to be read next
  std::optional<int64_t> current_;
  std::vector<uint64_t> in_window_;  // in steps of the window that is open
  std::vector<uint64_t> finished_;   // without a step, not told yet
  bool ended_ = false;
};

}  // namespace muster::detail
