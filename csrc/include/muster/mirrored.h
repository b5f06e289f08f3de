// MirroredStrategy: several replicas in one process.
#pragma once

#include <string>
#include <vector>

#include "muster/balance.h"
#include "muster/options.h"
#include "muster/strategy.h"

namespace muster {

/// One process, a replica a device, each on a thread of its own; one replica is stepped on the caller's thread. "cpu",
/// "cpu:0", "cpu:1", ... and repeated devices are logical replicas of one. No device: all CUDA devices where this build
/// has CUDA and there are some, else one CPU replica. Throws InvalidArgument for a device that does not parse or is not
/// there, or an option out of range, NotBuilt for a device that this build cannot use.
class MirroredStrategy : public Strategy {
 public:
  /// A replica for each of `devices`, which share batches as `balance` says.
  explicit MirroredStrategy(const std::vector<std::string>& devices = {}, const StrategyOptions& options = {},
                            Balance balance = Balance::equal);
};

}  // namespace muster
