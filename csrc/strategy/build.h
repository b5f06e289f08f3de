// Puts a strategy together from the groups, threads and seed that all ranks agree on.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "job/make_groups.h"
#include "muster/balance.h"
#include "muster/cluster.h"
#include "muster/options.h"
#include "muster/parameter_server.h"
#include "strategy/strategy_core.h"

namespace muster {

/// Whether the pool runs its own threads, or the language layer serves it with threads of its own.
enum class ReplicaThreads { own, foreign };

/// One process, a replica a device; "cpu", "cpu:0", "cpu:1", ... and repeated devices are logical replicas of one. No
/// device: all CUDA devices where this build has CUDA and there are some, else one CPU replica. Throws InvalidArgument
/// for a device that does not parse or is not there, NotBuilt for one that this build cannot use.
std::shared_ptr<StrategyCore> make_mirrored(const std::vector<std::string>& devices, const StrategyOptions& options,
                                            Balance balance, ReplicaThreads threads);

/// Collective over the cluster. One process a worker, each with a replica a device; no device: cuda:<local rank>, where
/// this build has CUDA and there are devices, else one CPU replica. Workers are on one host without `process_group` and
/// without `several`, of which at most one is given. On CUDA, NCCL carries the gradients, and what the hosts have to
/// tell one another goes as it does on the CPU.
/// Throws InvalidArgument where ranks disagree about options or the size of the world.
std::shared_ptr<StrategyCore> make_multi_worker(const Cluster& cluster, const std::vector<std::string>& devices,
                                                const StrategyOptions& options, ReplicaThreads threads,
                                                const comm::ProcessGroupPtr& process_group,
                                                const std::optional<SeveralHosts>& several = {});

/// Collective over the cluster, unless it names servers on which other workers train: it then joins their job. One
/// process a worker, each with a replica a device, all on the CPU; no device: one. Without servers in the cluster the
/// chief hosts one. Throws InvalidArgument for devices that are no CPUs and options that servers cannot honour, and as
/// make_multi_worker.
std::shared_ptr<StrategyCore> make_parameter_server(const Cluster& cluster, const std::vector<std::string>& devices,
                                                    const ServerOptions& server_options, const StrategyOptions& options,
                                                    ReplicaThreads threads);

}  // namespace muster
