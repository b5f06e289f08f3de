// What tests of strategies build workers from.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "muster/strategy.h"
#include "strategy/strategy_core.h"

namespace muster::testing {

inline std::vector<std::string> cpus(int n) { return std::vector<std::string>(static_cast<size_t>(n), "cpu"); }

/// A strategy of a core that the test made.
class OneWorker : public Strategy {
 public:
  explicit OneWorker(std::shared_ptr<StrategyCore> core) : Strategy(std::move(core), "Worker") {}
};

}  // namespace muster::testing
