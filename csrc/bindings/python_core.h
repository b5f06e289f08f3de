// The core of a strategy whose step functions are Python's.
#pragma once

#include <memory>

#include "strategy/strategy_core.h"

namespace muster {

/// `core`, which tells other ranks what Python raised and raises it as it was; its end waits for threads without the
/// GIL.
std::shared_ptr<StrategyCore> of_python(std::shared_ptr<StrategyCore> core);

}  // namespace muster
