// The loaders that were prepared with a strategy, and the passes over them that other workers have a part in.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/saved_tree.h"
#include "data/loader_host.h"
#include "strategy/strategy_core.h"

namespace muster {

/// Owned by the thread that prepares, iterates and steps. Its passes keep the core alive.
class Loaders final : public detail::LoaderHost {
 public:
  /// `connect` connects to the servers of the job, as a first step does.
  Loaders(std::shared_ptr<StrategyCore> core, std::function<void()> connect);
  ~Loaders() override;
  Loaders(const Loaders&) = delete;
  Loaders& operator=(const Loaders&) = delete;

  detail::LoaderJob job() const override;
  std::vector<double> capacities() const override { return core_->session().capacities(); }
  uint64_t seed() const override { return core_->session().streams().seed(); }
  int64_t steps() const noexcept override { return core_->stepper().steps(); }
  int add(const std::shared_ptr<detail::LoaderProgress>& loader, std::shared_ptr<detail::LoaderPlace> place,
          const std::string& size) override;
  bool any_has_more(bool has_more) override;
  std::shared_ptr<detail::DealtPass> deal(int loader, int64_t epoch, int64_t batches) override;
  std::shared_ptr<detail::SharedPass> share(int loader, int64_t epoch,
                                            detail::SharedPass::NextBatch next_batch) override;
  void leave_passes() override;

  /// In a worker that joined a synchronous job: `standings` is what Stepper::watch() gave, for passes that begin
  /// before this worker's next step.
  void joined(const std::string& standings);

  /// What a checkpoint has of C++'s loaders, by number: but of those that are over, behind the last one which is not.
  SavedValue::List saved();
  /// Throws LayoutMismatch where a loader cannot go on where a checkpoint has it.
  void check(const SavedValue::List& saved) const;
  /// C++'s loaders go on there; those that are prepared later do when they are.
  void take(const SavedValue::List& saved);

  /// How far the passes over the `loader`-th loader are that servers deal of, from that epoch on.
  std::vector<server::PassProgress> passes_of(int loader, int64_t epoch);
  /// Before servers are connected: they go on where those passes are, which must be of that loader.
  void go_on(int loader, const std::vector<server::PassProgress>& passes);

  /// A batch of a loader that goes into a step.
  struct Stepped {
    std::shared_ptr<detail::LoaderProgress> loader;
    int64_t batch = 0;     ///< its number, as LoaderProgress counts
    bool is_last = false;  ///< of its pass
  };
  /// Whether the next step of that set of optimizers leaves its window open, but at the end of a pass. Throws
  /// InvalidArgument where the strategy is closed.
  bool stays_open(int set);
  /// Whether a step of that set of optimizers, which these batches go into, is the last one of a pass: the last batch
  /// goes into as many steps as batches before it. Of a step of the caller's own tensors: whether that is so of a
  /// loader whose loop stands at its last batch, from which they may be made. Where the window stays open else, C++'s
  /// loaders read the next batch, if that tells it. Before the step, which note_step() or end_step() follow. Throws
  /// InvalidArgument where the strategy is closed.
  bool has_ended(int set, const std::vector<Stepped>& stepped);

  /// After a step that may have had batches of their passes: the window was left open, closed or dropped. No-op once
  /// another thread has closed the strategy.
  void end_step(detail::WindowEnd window);
  /// Likewise, after a step of that set which returned; `stepped`: it closed the window.
  void note_step(int set, bool stepped);

 private:
  void compare(int loader, const std::string& size);
  void connect() const;
  void take(size_t loader, const SavedValue::Dict& saved);
  void warn_of_short_end();
  std::string standings() const;
  ServerJob& served();

  const std::shared_ptr<StrategyCore> core_;
  const std::function<void()> connect_;
  const std::shared_ptr<detail::Members> members_;
  int num_loaders_ = 0;  // prepared so far
  std::vector<std::weak_ptr<detail::LoaderProgress>> loaders_;
  std::vector<std::shared_ptr<detail::LoaderPlace>> places_;
  std::map<size_t, SavedValue::Dict> awaited_;                    // places of loaders that are not prepared yet
  std::vector<std::shared_ptr<detail::DealtPass>> dealt_;         // that may be under way
  std::map<uint32_t, std::weak_ptr<detail::SharedPass>> shared_;  // the last ones, by loader
  std::map<uint32_t, detail::PassStanding> others_;               // where this worker joined, by loader
  int64_t told_at_ = 0;                                           // in steps: when it was told of them
  std::vector<Stepped> in_step_;                                  // that has_ended() looked at
  bool has_warned_of_short_end_ = false;
};

}  // namespace muster
