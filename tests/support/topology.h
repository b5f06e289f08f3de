// Workers that are threads of one process.
#pragma once

#include "job/topology.h"

namespace muster::testing {

/// Worker `rank` of `n` with as many CPU replicas each, which have of one another what is played.
inline Topology replicas_each(int rank, int n, int replicas) {
  Topology topology;
  topology.num_workers = n;
  topology.num_replicas = n * replicas;
  topology.rank = topology.local_rank = rank;
  topology.first_replica = rank * replicas;
  topology.replicas_of_worker.assign(static_cast<size_t>(n), replicas);
  topology.devices.assign(static_cast<size_t>(replicas), c10::Device(c10::kCPU));
  topology.access = access_between(topology.devices);
  return topology;
}

/// Worker `rank` of `n` with one CPU replica each.
inline Topology one_replica_each(int rank, int n) { return replicas_each(rank, n, 1); }

}  // namespace muster::testing
