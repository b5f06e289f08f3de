#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "job/job_agreement.h"
#include "job/make_groups.h"
#include "job/nccl_groups.h"
#include "muster/error.h"

namespace muster {

Groups groups_over(const comm::ProcessGroupPtr& process_group, const Cluster& cluster, Topology& topology,
                   comm::Milliseconds timeout) {
  if (process_group->getRank() != cluster.rank || process_group->getSize() != cluster.num_workers) {
    throw InvalidArgument("the process group has rank " + std::to_string(process_group->getRank()) + " of " +
                          std::to_string(process_group->getSize()) + ", the cluster rank " +
                          std::to_string(cluster.rank) + " of " + std::to_string(cluster.num_workers) +
                          "; both must describe the same job");
  }
  const comm::C10dOptions options{.timeout = timeout};
  Groups groups;
  groups.store = process_group->getStore();
  groups.workers = comm::make_c10d(process_group, options);
  groups.backend = "the process group's backend (" + process_group->getBackendName() + ")";
  groups.overlap = false;
  place_replicas(topology, *groups.workers);
  if (topology.devices.front().is_cuda()) {
    const auto make_control = [&](const std::string&) {
      return comm::make_hierarchical(process_group, topology.local_replicas(), options);
    };
    use_nccl(groups, net::open_store(cluster, timeout), topology, make_control, timeout);
    return groups;
  }
  groups.gradients = comm::make_hierarchical(process_group, topology.local_replicas(), options);
  groups.step = comm::make_hierarchical(process_group, topology.local_replicas(), options);
  return groups;
}

}  // namespace muster
