// Steps of flat optimizers that replicas divide: each steps the elements it owns, for all. docs/threading.md, "The end
// of a window on one host", says what orders their accesses to one another's memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "job/topology.h"
#include "muster/options.h"
#include "optimizer/flat_optimizer.h"
#include "optimizer/parameter_home.h"
#include "window/window.h"
#include "window/window_context.h"

namespace muster {

/// Whether each replica steps what it owns, for all: where they see one another's memory.
bool divides_steps(const Topology& topology, const Groups& groups, const StrategyOptions& options);

/// Owned by the stepping thread. Where several processes divide a step, parameters and state of flat optimizers lie in
/// memory that all of them see.
class DividedUpdate {
 public:
  explicit DividedUpdate(const WindowContext& context) : context_(context) {}

  /// Local, before a micro-batch, while no other process steps: parameters whose memory user code replaced go home.
  void bring_back();

  /// Steps `optimizer`, whose parameter i has registry index `parameters[i]` and the sum `means[i]`. Collective over
  /// replicas.
  void step(FlatOptimizer& optimizer, const Tail& tail, const std::vector<FlatGradient>& means,
            const std::vector<int>& parameters, const FlatGroups& groups, const kernels::StepScalars& scalars,
            const OnReplicas& on_replicas);

  /// Gives parameters and optimizer state that other processes see memory of their own, with their values: nobody
  /// writes to them any more. Local; once the group has ended, or before it is left.
  void leave_memory();

 private:
  void place_in_shared_memory(const Tail& tail);

  WindowContext context_;
  std::unique_ptr<ParameterHome> home_;
  // State of flat optimizers where other processes step it.
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> common_states_;
};

}  // namespace muster
