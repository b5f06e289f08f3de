#include "muster/mirrored.h"

#include "strategy/build.h"

namespace muster {

MirroredStrategy::MirroredStrategy(const std::vector<std::string>& devices, const StrategyOptions& options,
                                   Balance balance)
    : Strategy(make_mirrored(devices, options, balance, ReplicaThreads::own), "MirroredStrategy") {}

}  // namespace muster
