#pragma once

#include <string>
#include <vector>

#include "muster/options.h"
#include "muster/strategy.h"

namespace muster {

/// One process, a replica a device, each on a thread of its own. "cpu", "cpu:0", "cpu:1", ... and repeated devices are
/// logical replicas of the CPU. No device: one CPU replica, stepped on the caller's thread. Throws InvalidArgument for
/// a device that does not parse or an option out of range, NotBuilt for a device that this build cannot use.
class MirroredStrategy : public Strategy {
 public:
  explicit MirroredStrategy(const std::vector<std::string>& devices = {}, const StrategyOptions& options = {});
};

}  // namespace muster
