// The comparison of optimizers and values over workers before they step: where each element is stepped by one worker
// for all, a difference would leave every worker with a part of each.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "kernels/kernels.h"
#include "optimizer/flat_optimizer.h"
#include "window/parameter_registry.h"

namespace muster {

/// An optimizer as the next step uses it; parameter i of a flat one has registry index `parameters[i]`.
struct OptimizerStep {
  FlatOptimizer* flat = nullptr;  ///< null for an optimizer that is not flat: only its hyperparameters are compared
  std::vector<int> parameters = {};
  FlatGroups groups = {};
  std::vector<std::string> hyperparameters = {};  ///< in words: "lr 0.1 in group 0"
};

/// This worker's part of the comparison, for one window. Owned by the thread that steps.
class Agreement {
 public:
  Agreement() = default;
  /// `scale`: what this worker's gradients are multiplied by. `written`: parameters (registry indices, ascending) that
  /// user code wrote or replaced since the last step. `shares_state`: each worker steps its part of optimizer state for
  /// all workers.
  Agreement(const ParameterRegistry& registry, std::vector<OptimizerStep> steps, const kernels::LossScaleState& scale,
            const std::vector<int>& written, bool shares_state);

  /// A digest of the loss scale, the hyperparameters and, for flat optimizers, of groups, counts of steps and where
  /// state lies: equal on workers where these are equal. Below 2^52, so that it is exact in fp64. 0 without optimizers.
  double digest() const noexcept { return digest_; }
  /// Whether user code wrote parameters here, or loaded state, that other workers may have with other values.
  bool has_writes() const noexcept { return !written_.empty(); }

  /// Collective over workers, called where their digests differ. Throws LayoutMismatch naming the first difference.
  [[noreturn]] void throw_difference(comm::Communicator& workers) const;

  /// Collective over workers, called where has_writes() on any of them: compares the values of everything that any
  /// worker wrote. Returns the parameters that were compared. Throws LayoutMismatch naming the first tensor that
  /// differs, and the ranks that wrote it.
  std::vector<int> compare_values(comm::Communicator& workers) const;

  /// After that: what was given here to optimizers as state before this window is agreed.
  void note_agreed() const noexcept;

 private:
  /// A parameter, or (optimizer >= 0) the state of a parameter of a flat optimizer.
  struct Place {
    int optimizer = -1;
    int parameter = 0;  // registry index, or position in the optimizer

    auto operator<=>(const Place&) const = default;
  };

  /// The standing of a parameter's state; has_own_state only where workers share state, since each worker has its own
  /// elsewhere.
  OptimizerState::Standing standing(const OptimizerStep& step, size_t parameter) const;
  /// Whether this worker's state may differ from that of others: state that the program gave an optimizer which every
  /// worker steps for itself. Where workers step a shard each, a worker's state is its shard's alone.
  bool is_in_doubt(const OptimizerStep& step, size_t parameter, const OptimizerState::Standing& standing) const;
  void look_at_steps();
  std::string describe() const;
  std::string name_of(const Place& place) const;
  uint64_t hash_of(const Place& place) const;

  const ParameterRegistry* registry_ = nullptr;
  std::vector<OptimizerStep> steps_;
  kernels::LossScaleState scale_{.scale = 1, .growth_tracker = 0};
  bool shares_state_ = false;
  std::vector<Place> written_;
  double digest_ = 0;
};

}  // namespace muster
