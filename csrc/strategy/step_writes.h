// Writes to parameters in a step.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <vector>

#include "window/parameter_registry.h"

namespace muster {

/// A step function runs once for each of a process's replicas: what it writes to parameters in memory that they share,
/// it would write as often, while others read there. Lives shorter than the registry.
class StepWrites {
 public:
  /// Before a step on replicas of these devices. By the thread that steps.
  StepWrites(const ParameterRegistry& registry, const std::vector<c10::Device>& devices);

  /// After a replica's part of it, by the replica's thread. Throws InvalidArgument for a parameter that was written
  /// since the step began, in ways that torch counts, unless forward is known to (ParameterRegistry::expect_writes).
  void check() const;

 private:
  const ParameterRegistry& registry_;
  std::vector<uint32_t> versions_;  // by parameter; empty where replicas share no memory
};

}  // namespace muster
