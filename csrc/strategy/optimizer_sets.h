// Sets of optimizers that step together, for the language layers.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "strategy/strategy_core.h"

namespace muster {

/// Which optimizers of a strategy step together, and the core's numbers of their sets of parameters. An optimizer is
/// its position in the order in which optimizers were prepared. Owned by the thread that prepares and steps.
class OptimizerSets {
 public:
  /// An optimizer of a set.
  struct Member {
    std::vector<int> parameters;  // by registry index
    bool is_flat = false;         // it steps from the reduced sums
  };
  using Resolve = std::function<std::vector<Member>()>;

  /// The optimizers that a step is to be made with.
  struct Choice {
    std::vector<int> optimizers = {};  // in the order of their steps
    /// Whether they are all that are prepared: such choices are one, of which more optimizers may be prepared.
    bool is_whatever_is_prepared = false;
    /// Differs from that of an earlier equal choice where the optimizers' parameters may have changed.
    std::vector<uint64_t> look = {};

    bool operator==(const Choice&) const = default;
  };

  explicit OptimizerSets(std::shared_ptr<StrategyCore> core) : core_(std::move(core)) {}

  /// The core's number of the set of these optimizers' parameters; of all parameters where there are no optimizers.
  /// `resolve` gives the members of a choice that was not used before, or has another look since; `may_share`: as
  /// ParameterSets::set_of. Throws what `resolve` throws, as that, and InvalidArgument for a parameter of two members;
  /// the choice stays as it was then.
  int set_of(Choice choice, const Resolve& resolve, bool may_share = false);

  /// All sets, in the order of their first steps.
  std::vector<int> numbers() const;

  /// The optimizers that a set of numbers() was last used with, in the order of their steps.
  const std::vector<int>& optimizers_of(int set) const { return used_.at(set).optimizers; }

  /// Whether there are any, and all are flat.
  bool is_fused(int set) const { return used_.at(set).is_fused; }

 private:
  struct Known {
    Choice choice;
    int set = -1;
    bool is_fused = false;
  };
  struct Used {
    std::vector<int> optimizers;
    bool is_fused = false;
  };

  void check_window(const Known& next) const;
  std::vector<Known>::iterator find(const Choice& choice);
  std::vector<int> parameters_of(const std::vector<Member>& members) const;

  std::shared_ptr<StrategyCore> core_;
  std::vector<Known> known_;
  std::map<int, Used> used_;  // by set
};

}  // namespace muster
