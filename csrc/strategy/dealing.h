// Batches that parameter servers deal, whole and in order, to whichever worker asks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "data/loader_pass.h"
#include "server/protocol/protocol.h"
#include "strategy/strategy_core.h"

namespace muster::detail {

/// This worker's share of one pass over a loader. A batch that went into a step is finished by that step; any other
/// when the loop asks for the one after it. What reaches a server throws as ServerExchange.
class Dealing final : public LoaderPass {
 public:
  /// Of the `loader`-th of the strategy, whose pass has `batches` on every worker.
  Dealing(std::shared_ptr<StrategyCore> core, int loader, int64_t epoch, int64_t batches);

  /// That of a batch that was dealt.
  std::optional<int64_t> next() override;
  void yielded(int64_t number) override { current_ = number; }
  void lost(int64_t number) override;
  void done() override;

  /// The batch that the loop got; none once it went into a step.
  std::vector<server::BatchId> current() const;
  /// It went into a step, which ended its window or not.
  void stepped(bool ended);

  /// Waits while other workers may leave some, calling WaitHook; throws Timeout after the strategy's.
  bool wait_for_more() override;

  /// Gives back what is not finished, if the pass has not ended: other workers may wait for it.
  void leave();
  bool has_ended() const noexcept { return ended_; }

 private:
  std::optional<int64_t> ask();

  std::shared_ptr<StrategyCore> core_;
  uint32_t loader_;
  uint64_t epoch_;
  uint64_t batches_;
  std::optional<int64_t> waited_for_;  // dealt at the end of a wait, to be read next
  std::optional<int64_t> current_;
  std::vector<uint64_t> in_window_;  // in steps of the window that is open
  std::vector<uint64_t> finished_;   // without a step, not told yet
  bool ended_ = false;
};

}  // namespace muster::detail
