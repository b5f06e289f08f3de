// MultiWorkerMirroredStrategy: a process a worker, whose replicas step together.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <string>
#include <vector>

#include "muster/cluster.h"
#include "muster/options.h"
#include "muster/strategy.h"

namespace c10d {
class ProcessGroup;
}

namespace muster {

/// A process a worker, each with a replica a device ("cuda:0", "cpu", "cpu:0", ...; none: `cuda:<local rank>` where
/// this build has CUDA and there are devices, the only one where the process sees no other, else one CPU replica). On
/// CUDA gradients go through NCCL. Collective over the cluster: returns when all workers are there. Throws
/// InvalidArgument where ranks disagree about options or the size of the world, or share a GPU, Timeout naming the
/// ranks that did not come.
class MultiWorkerMirroredStrategy : public Strategy {
 public:
  /// Workers of one host reduce through its memory. Between hosts sums go over TCP, to the bits of one host, and on
  /// CUDA NCCL carries them; `cluster.address` is then one that all hosts reach, and they reach one another on all
  /// ports. Neither encrypts nor authenticates.
  explicit MultiWorkerMirroredStrategy(const Cluster& cluster = Cluster::from_env(),
                                       const std::vector<std::string>& devices = {},
                                       const StrategyOptions& options = {});

  /// Communicates through `process_group` (include torch/csrc/distributed/c10d/ProcessGroup.hpp to pass one), on any
  /// number of hosts.
  MultiWorkerMirroredStrategy(const Cluster& cluster, const std::vector<std::string>& devices,
                              const StrategyOptions& options,
                              const c10::intrusive_ptr<c10d::ProcessGroup>& process_group);
};

}  // namespace muster
