// Checkpoints of a training loop: when it saves, and what it keeps.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>

#include "muster/saved_value.h"
#include "muster/step.h"
#include "muster/strategy.h"

namespace muster {

/// A value. The same on every rank.
struct CheckpointsOptions {
  /// Checkpoints::after_step saves once so many further steps were made; empty: the number of steps is left out of it.
  std::optional<int64_t> every = {};
  /// Or once so many seconds have passed since the last checkpoint, by the chief's clock. With neither of the two it
  /// saves only where the job stops.
  std::optional<double> every_seconds = {};
  std::optional<int> keep = {};  ///< how many of the newest stay, at least 1; empty: all
  /// Which of two metrics is better.
  enum class Mode { min, max };
  Mode mode = Mode::min;             ///< which metric Checkpoints::best prefers, the least or the greatest
  std::optional<int> best_keep = 1;  ///< of those that were the best when they came, as `keep`
};

/// Checkpoints of a training loop: `load` before it, `after_step` after each step, and `best` after each evaluation.
///
///     Checkpoints checkpoints(strategy, "runs", {.every = 100, .keep = 3});
///     checkpoints.load();
///     for (...) {
///       const auto result = strategy.step(...);
///       if (checkpoints.after_step(result)) return;  // SIGTERM: saved, to be gone on with
///     }
///
/// Every checkpoint is one of Strategy::save. What `after_step` and `save` write is in the folder itself, what `best`
/// writes in its folder "best"; Python's muster.Checkpoints reads both, and the reverse. All ranks make the same calls;
/// externally synchronised. The strategy outlives it.
class Checkpoints {
 public:
  /// Of `strategy`, in `folder`, the same on every rank; empty: nothing is saved or loaded. Throws InvalidArgument for
  /// options that are out of bounds.
  Checkpoints(Strategy& strategy, const std::filesystem::path& folder, const CheckpointsOptions& options = {});
  ~Checkpoints();
  Checkpoints(const Checkpoints&) = delete;
  Checkpoints& operator=(const Checkpoints&) = delete;

  /// As Strategy::load of the folder, or of its checkpoint with this `number`. Collective, after prepare().
  std::optional<SavedState> load(std::optional<int64_t> number = {});

  /// Saves where that is due, and where Strategy::stopping has turned true; returns whether it has, so that the loop is
  /// left. `result` is what the step, or flush(), returned; `values` are saved with it, and load() returns them. A
  /// checkpoint is made after a step that leaves no window open: later, where one is. Collective where it saves.
  bool after_step(const StepResult& result, const SavedState& values = {});
  /// The same after flush().
  bool after_step(const std::optional<StepResult>& flushed, const SavedState& values = {});

  /// Saves now. Collective, with no window open.
  void save(const SavedState& values = {});

  /// Saves into the folder's folder "best" where `metric` is better than that of the checkpoint there, whichever job
  /// made it, or none is there; returns whether it is. NaN is not better than anything. The chief's `metric` decides:
  /// reduce() it over all ranks. Collective, with no window open; waits for a checkpoint that is being written. With
  /// parameter servers the chief acts alone, and others get false. Throws InvalidArgument where the other mode was used
  /// in this folder, and for a value that is called "best", as the metric is.
  bool best(double metric, const SavedState& values = {});

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace muster
