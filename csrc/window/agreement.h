// What the workers must agree on before they step: where each element is stepped by one of them for all, a difference
// would leave every one with a part of each.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "optimizer/flat_optimizer.h"
#include "window/parameter_registry.h"

namespace muster {

/// An optimizer as a step is going to use it; parameter i of a flat one has registry index `parameters[i]`.
struct OptimizerStep {
  FlatOptimizer* flat = nullptr;  ///< null for any other, of which there are hyperparameters alone
  std::vector<int> parameters = {};
  FlatGroups groups = {};
  std::vector<std::string> hyperparameters = {};  ///< in words: "lr 0.1 in group 0"
};

/// This worker's side of it, in one window. Owned by the thread that steps.
class Agreement {
 public:
  Agreement() = default;
  /// `written`: parameters (registry indices, ascending) that user code wrote or replaced since the last step.
  /// `shares_state`: each worker steps state for all.
  Agreement(const ParameterRegistry& registry, std::vector<OptimizerStep> steps, const std::vector<int>& written,
            bool shares_state);

  /// Of hyperparameters and, of flat optimizers, groups, counts of steps and where state lies: equal where they are;
  /// below 2^52, so that it is exact in fp64. 0 without optimizers.
  double digest() const noexcept { return digest_; }
  /// Whether there are values that only this worker knows to be those of the others.
  bool has_writes() const noexcept { return !written_.empty(); }

  /// Collective over workers, for those whose digests differ. Throws LayoutMismatch naming the first difference.
  [[noreturn]] void throw_difference(comm::Communicator& workers) const;

  /// Collective over workers, where one of them has_writes(): compares the values of what any of them wrote. Returns
  /// the parameters that were compared. Throws LayoutMismatch naming the first that differs, and who wrote it.
  std::vector<int> compare_values(comm::Communicator& workers) const;

 private:
  /// A parameter, or (optimizer >= 0) the state of a parameter of a flat optimizer.
  struct Place {
    int optimizer = -1;
    int parameter = 0;  // registry index, or position in the optimizer

    auto operator<=>(const Place&) const = default;
  };

  /// Where each worker has state of its own (sharded, or stepped by all), whose it is tells nothing.
  OptimizerState::Standing standing(const OptimizerStep& step, size_t parameter) const;
  void look_at_steps();
  std::string describe() const;
  std::string name_of(const Place& place) const;
  uint64_t hash_of(const Place& place) const;

  const ParameterRegistry* registry_ = nullptr;
  std::vector<OptimizerStep> steps_;
  bool shares_state_ = false;
  std::vector<Place> written_;
  double digest_ = 0;
};

}  // namespace muster
