// Workers that are threads of one process.
#pragma once

#include "job/topology.h"

namespace muster::testing {

/// Worker `rank` of `n` with one CPU replica each.
inline Topology one_replica_each(int rank, int n) {
  Topology topology;
  topology.num_workers = topology.num_replicas = n;
  topology.rank = topology.local_rank = topology.first_replica = rank;
  topology.replicas_of_worker.assign(static_cast<size_t>(n), 1);
  topology.devices = {c10::Device(c10::kCPU)};
  return topology;
}

}  // namespace muster::testing
