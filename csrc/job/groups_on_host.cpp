#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "job/job_agreement.h"
#include "job/make_groups.h"
#include "job/nccl_groups.h"

namespace muster {

std::shared_ptr<comm::HostMesh> connect_workers(const net::StorePtr& store, const std::string& prefix,
                                                const Topology& topology, int replicas, comm::Milliseconds timeout) {
  c10d::PrefixStore prefixed(prefix, store);
  return comm::HostMesh::connect(
      prefixed, {.rank = topology.rank, .num_workers = topology.num_workers, .replicas = replicas, .timeout = timeout});
}

Groups groups_on_host(const Cluster& cluster, Topology& topology, comm::Milliseconds timeout) {
  const auto store = net::open_store(cluster, timeout);
  const auto workers = connect_workers(store, "workers", topology, 1, timeout);
  Groups groups;
  groups.store = store;
  groups.workers = workers->make_group("workers").front();
  groups.backend = "memory that the processes of this host share";
  place_replicas(topology, *groups.workers);
  const auto replicas = topology.has_one_replica_each()
                            ? workers
                            : connect_workers(store, "replicas", topology, topology.local_replicas(), timeout);
  if (topology.devices.front().is_cuda()) {
    use_nccl(groups, store, topology, [&](const std::string& name) { return replicas->make_group(name); }, timeout);
    return groups;
  }
  groups.gradients = replicas->make_group("gradients");
  groups.step = replicas->make_group("step");
  return groups;
}

}  // namespace muster
