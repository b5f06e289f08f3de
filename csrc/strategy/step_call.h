// One call of step, run or flush, as the language layer describes it.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "muster/step.h"
#include "window/agreement.h"
#include "window/server_exchange.h"

namespace muster {

/// A value. Its functions are called on the stepping thread, but for `call`.
struct StepCall {
  /// Calls the user's function for a local replica, on its thread. Null for flush.
  std::function<Loss(int local_replica)> call;
  /// Samples of each local replica's part: 0 is an empty part, for which `call` is not called; negative: unknown, so
  /// that a loss averaged with others must carry its weight.
  std::vector<int64_t> rows;
  /// What tensors of these parts have for samples where that is less: of a part that was read with some left out.
  /// Empty: nobody looked.
  std::vector<int64_t> samples_left = {};
  /// Samples that a part has on average where the loader that it comes from is not at its end; 0: unknown.
  double usual_rows = 0;
  /// The set that takes part, from ParameterSets::set_of.
  int set = 0;
  /// Dealt batches that the parts are of; see ServerExchange::note_batches.
  std::vector<server::BatchId> batches = {};
  /// True on steps made after a loader yielded its last batch.
  bool loader_ended = false;
  /// The set's optimizers as they were before the call, all flat or none; empty without any. Workers compare them
  /// before a window closes, and flat ones step where it was not skipped.
  std::vector<OptimizerStep> optimizers = {};
  /// Calls this rank's hooks, if there are any, before flat optimizers step, and returns the groups that they and the
  /// user's function left, by optimizer. Not null with flat ones. See Updates::call_hooks.
  std::function<std::vector<FlatGroups>()> before_update = {};
  /// Steps optimizers that are not flat, from `.grad`, where a window closed and was not skipped. Null without any.
  std::function<void()> update_from_grad = {};
  /// See ReplicaPool::run.
  std::function<void()> poll;
  std::function<void()> interrupt;

  /// Whether flat optimizers step, from the reduced sums.
  bool steps_flat() const noexcept { return !optimizers.empty() && optimizers.front().flat != nullptr; }
};

}  // namespace muster
