// Steps of flat optimizers that the devices of one process divide: each steps what it owns, and stores the parameters
// to all of them.
#pragma once

#include <vector>

#include "job/topology.h"
#include "muster/options.h"
#include "optimizer/flat_optimizer.h"
#include "window/copy_check.h"
#include "window/tail.h"
#include "window/window_context.h"

namespace muster {

/// Whether the devices of this process's replicas divide steps, where nobody asks for whole sums: several that have
/// their own memory each, and read and write one another's (which this enables). Where workers have shards, only if
/// those of all workers do.
bool devices_divide(const Topology& topology, const StrategyOptions& options);

/// Whether replicas of several workers on devices have a part each of their worker's shard: likewise, but that a worker
/// may have one replica. Equal on all workers.
bool replicas_have_shards(const Topology& topology, const StrategyOptions& options);

/// Owned by the stepping thread, on whose current streams of the devices everything is enqueued. State is common
/// memory, each part of it on the device that steps it, so that any window may also be stepped by the first device
/// alone.
class DeviceShares {
 public:
  explicit DeviceShares(const WindowContext& context) : context_(context) {}

  /// After a window's end, before the first step. What was written of parameters since it opened (in forward passes, by
  /// hooks) stands as the first device has it. False where the devices do not have all trainable ones alike: the first
  /// one got the sums of all, and is to step.
  bool mend();

  /// Steps `optimizer`, whose parameter i has registry index `parameters[i]`; `scalars[r]` are in the memory of local
  /// replica r's device. Every device begins behind what all held before, and all end behind every one's step; they
  /// have what others stepped, unless the optimizer has a shard: then each has its own part.
  void step(FlatOptimizer& optimizer, const Tail& tail, const std::vector<int>& parameters, const FlatGroups& groups,
            const std::vector<const kernels::StepScalars*>& scalars);

 private:
  DividedStep divide(const FlatOptimizer& optimizer, const Tail& tail, const std::vector<int>& parameters,
                     const std::vector<const kernels::StepScalars*>& scalars) const;
  void place_state(FlatOptimizer& optimizer, const DividedStep& divided, const FlatGroups& groups) const;
  void join() const;
  void bring_sums_to_first() const;

  WindowContext context_;
  CopyCheck check_;
};

}  // namespace muster
