// Batches that parameter servers deal, whole and in order, to whichever worker asks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "data/members.h"
#include "data/pass.h"

namespace muster::detail {

/// This worker's share of one pass over a loader. A batch that went into a step is finished by that step; any other
/// when the loop asks for the one after it. Errors of a server are thrown as Members throws them.
class DealtPass final : public LoaderPass {
 public:
  /// A pass that has `batches` on every worker. `timeout`, in seconds, bounds wait_for_more().
  DealtPass(std::shared_ptr<Members> members, server::PassId pass, int64_t batches, double timeout);

  /// The number of a batch that was dealt, counted over all workers.
  std::optional<int64_t> next() override;
  void yielded(int64_t number) override { current_ = number; }
  void lost(int64_t number) override;
  void done() override;
  /// Waits while other workers may leave some, calling WaitHook; throws Timeout.
  bool wait_for_more() override;
  std::optional<server::BatchId> begin_step() override;
  void end_step(WindowEnd window, const std::vector<uint32_t>& members) override;

  /// Gives back what is not finished, if the pass has not ended: other workers may wait for it.
  void leave();
  bool has_ended() const noexcept { return ended_; }

 private:
  std::optional<int64_t> ask();

  const std::shared_ptr<Members> members_;
  const server::PassId pass_;
  const uint64_t batches_;
  const double timeout_;
  std::optional<int64_t> waited_for_;  // dealt at the end of a wait, to be read next
  std::optional<int64_t> current_;     // the loop has it, and no step
  std::optional<int64_t> stepping_;
  std::vector<uint64_t> in_window_;  // in steps of the window that is open
  std::vector<uint64_t> finished_;   // without a step, not told yet
  bool ended_ = false;
};

}  // namespace muster::detail
