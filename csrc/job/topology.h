// The topology of a job: where this process's replicas are in it, and the groups they communicate in.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "device/peer_access.h"
#include "job/bucket_sizes.h"
#include "job/server_job.h"
#include "net/rendezvous.h"

namespace muster::comm {
class LostWorkers;
}

namespace muster {

class CallWatch;

/// A value. Replica indices are worker-major: worker 0's replicas come first.
struct Topology {
  int num_workers = 1;
  int rank = 0;
  int local_rank = 0;
  int num_replicas = 1;
  int first_replica = 0;                   ///< job-wide index of this process's first replica
  std::vector<int> replicas_of_worker{1};  ///< by worker
  std::vector<c10::Device> devices;        ///< by local replica
  /// The least that any worker's replicas have of one another's devices.
  DeviceAccess access = DeviceAccess::common;

  int local_replicas() const noexcept { return static_cast<int>(devices.size()); }
  /// Whether each worker has one replica, so that groups of workers and of replicas have the same ranks.
  bool has_one_replica_each() const noexcept { return num_replicas == num_workers; }
  /// Job-wide index of a worker's first replica.
  int first_replica_of(int worker) const {
    return std::accumulate(replicas_of_worker.begin(), replicas_of_worker.begin() + worker, 0);
  }
};

/// One handle a local replica in the first three; `workers` has one rank a process.
struct Groups {
  std::vector<comm::CommunicatorPtr> gradients;  ///< buckets and tails
  std::vector<comm::CommunicatorPtr> step;       ///< collectives that user code issues inside a step
  bool step_shares_order = false;                ///< operations of step and gradients need one order on all ranks
  std::vector<comm::CommunicatorPtr> control;    ///< tensors on the host; empty where those of gradients are there
  comm::CommunicatorPtr workers;                 ///< collectives outside a step
  comm::CommunicatorPtr prepare;                 ///< what workers agree on beforehand; null: `workers`
  net::StorePtr store = {};                      ///< that the workers meet through; null where none is known
  std::shared_ptr<comm::LostWorkers> lost = {};  ///< of several hosts; null elsewhere
  std::shared_ptr<CallWatch> calls = {};         ///< of several workers that make the same calls; null elsewhere
  std::string backend;                           ///< what gradients are reduced through, in words
  std::optional<ServerJob> servers;              ///< that hold the parameters; `gradients` is then within this process
  std::optional<LinkSpeed> link;                 ///< of gradients, where it was measured
  BucketSizes buckets;
  comm::Communicator& to_prepare() const { return prepare ? *prepare : *workers; }
  /// Whether this worker came to a job that others had begun, so that servers tell it what those agreed on.
  bool joins() const { return servers && servers->joins; }
  /// Whether workers step on their own, so that servers deal whole batches.
  bool deals_batches() const { return servers && servers->staleness != 0; }
  /// Whether workers of parameter servers step together, so that those which are live divide each batch.
  bool shares_batches() const { return servers && servers->staleness == 0; }
  /// The group in which a local replica's host tells the others something.
  const comm::CommunicatorPtr& control_of(size_t local_replica) const {
    return control.empty() ? gradients[local_replica] : control[local_replica];
  }

  /// False where gradients and step share one ordered transport, so that buckets must leave after backward.
  bool overlap = true;
};

}  // namespace muster
