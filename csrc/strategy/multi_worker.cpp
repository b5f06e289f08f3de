#include "muster/multi_worker.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "job/job_agreement.h"
#include "strategy/build.h"

namespace muster {

namespace {

// Without a process group of the program's.
std::shared_ptr<StrategyCore> make_connected(const Cluster& cluster, const std::vector<std::string>& devices,
                                             const StrategyOptions& options) {
  options.validate();
  cluster.validate();
  const auto several = connect_hosts(cluster, timeout_of(options));
  return make_multi_worker(cluster, devices, options, ReplicaThreads::own, nullptr, several);
}

}  // namespace

MultiWorkerMirroredStrategy::MultiWorkerMirroredStrategy(const Cluster& cluster,
                                                         const std::vector<std::string>& devices,
                                                         const StrategyOptions& options)
    : Strategy(make_connected(cluster, devices, options), "MultiWorkerMirroredStrategy") {}

MultiWorkerMirroredStrategy::MultiWorkerMirroredStrategy(const Cluster& cluster,
                                                         const std::vector<std::string>& devices,
                                                         const StrategyOptions& options,
                                                         const c10::intrusive_ptr<c10d::ProcessGroup>& process_group)
    : Strategy(process_group ? make_multi_worker(cluster, devices, options, ReplicaThreads::own, process_group)
                             : make_connected(cluster, devices, options),
               "MultiWorkerMirroredStrategy") {}

}  // namespace muster
