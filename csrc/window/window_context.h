// What a set shares with the end of its windows.
#pragma once

#include "job/topology.h"
#include "muster/options.h"
#include "window/gradient_sums.h"
#include "window/parameter_registry.h"

namespace muster {

/// References; what they refer to outlives the window.
struct WindowContext {
  ParameterRegistry& registry;
  const Topology& topology;
  const Groups& groups;
  const StrategyOptions& options;
  GradientSums& sums;
};

}  // namespace muster
