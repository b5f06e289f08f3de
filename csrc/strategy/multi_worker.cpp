#include "muster/multi_worker.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "strategy/build.h"

namespace muster {

MultiWorkerMirroredStrategy::MultiWorkerMirroredStrategy(const Cluster& cluster,
                                                         const std::vector<std::string>& devices,
                                                         const StrategyOptions& options)
    : MultiWorkerMirroredStrategy(cluster, devices, options, nullptr) {}

MultiWorkerMirroredStrategy::MultiWorkerMirroredStrategy(const Cluster& cluster,
                                                         const std::vector<std::string>& devices,
                                                         const StrategyOptions& options,
                                                         const c10::intrusive_ptr<c10d::ProcessGroup>& process_group)
    : Strategy(make_multi_worker(cluster, devices, options, ReplicaThreads::own, process_group),
               "MultiWorkerMirroredStrategy") {}

}  // namespace muster
