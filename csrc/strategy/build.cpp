#include "strategy/build.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <utility>

#include "core/heap.h"
#include "core/launched.h"
#include "core/log.h"
#include "job/call_watch.h"
#include "job/devices.h"
#include "job/job_agreement.h"
#include "job/make_groups.h"
#include "muster/error.h"

namespace muster {

namespace {

std::shared_ptr<StrategyCore> assemble(Topology topology, Groups groups, const StrategyOptions& options,
                                       ReplicaThreads replica_threads) {
  ServerJob* const job = groups.servers ? &*groups.servers : nullptr;
  const bool joins = job != nullptr && job->joins;
  const int threads =
      joins ? static_cast<int>(job->facts.threads) : agree_on_threads(options, topology, *groups.workers);
  const auto seed = joins ? job->facts.seed : agree_on_seed(options, *groups.workers);
  if (job != nullptr) {
    job->facts.seed = seed;
    job->facts.threads = static_cast<uint32_t>(threads);
  }
  if (job == nullptr) groups.calls = watch_calls(groups.workers, groups.store, timeout_of(options));
  if (topology.devices.front().is_cpu()) keep_freed_memory();
  auto pool = std::make_shared<ReplicaPool>(topology.local_replicas(), threads);
  if (replica_threads == ReplicaThreads::own) pool->start();
  set_log_rank(topology.rank, topology.num_workers);
  log(LogLevel::info, std::to_string(topology.num_replicas) + " replicas in " + std::to_string(topology.num_workers) +
                          " workers, " + std::to_string(threads) + " intra-op threads each");
  return std::make_shared<StrategyCore>(std::move(topology), std::move(groups), options, std::move(pool), seed);
}

void check_servers_can(const StrategyOptions& options) {
  const auto refuse = [](bool is_asked, const char* what) {
    if (is_asked) throw InvalidArgument(std::string("parameter servers step, so that workers cannot have ") + what);
  };
  refuse(!options.fuse, "fuse=False; leave it out");
  refuse(options.keep_gradients, "keep_gradients; leave it out");
  refuse(options.shard_optimizer, "shard_optimizer: the state is divided over the servers; leave it out");
  refuse(options.wire != Wire::exact, "wire: gradients travel as they are accumulated; leave it out");
}

void check_are_cpus(const std::vector<std::string>& devices) {
  for (const auto& device : devices) {
    if (device.starts_with("cpu")) continue;
    throw InvalidArgument(
        "device '" + device +
        "': workers of parameter servers have their replicas on the CPU; write \"cpu\", once for each, "
        "or use MultiWorkerMirroredStrategy");
  }
}

// Each process would train a model of its own.
void warn_of_others() {
  const auto launched = find_launched();
  if (!launched || launched->num_workers == 1 || launched->rank != 0) return;
  log(LogLevel::warning, "MirroredStrategy trains in one process, and the launcher (" + launched->launcher +
                             ") has started " + std::to_string(launched->num_workers) +
                             ", which learn apart from one another; use MultiWorkerMirroredStrategy.from_env() for one "
                             "model, or start one process");
}

}  // namespace

std::shared_ptr<StrategyCore> make_mirrored(const std::vector<std::string>& devices, const StrategyOptions& options,
                                            Balance balance, ReplicaThreads threads) {
  options.validate();
  warn_of_others();
  Topology topology;
  topology.devices = parse_devices(devices.empty() ? all_cuda_devices() : devices);
  topology.num_replicas = topology.local_replicas();
  topology.replicas_of_worker = {topology.num_replicas};
  auto groups = groups_in_process(topology.devices, timeout_of(options));
  auto core = assemble(std::move(topology), std::move(groups), options, threads);
  if (balance == Balance::automatic) core->session().balance_parts();
  return core;
}

std::shared_ptr<StrategyCore> make_multi_worker(const Cluster& cluster, const std::vector<std::string>& devices,
                                                const StrategyOptions& options, ReplicaThreads threads,
                                                const comm::ProcessGroupPtr& process_group,
                                                const std::optional<SeveralHosts>& several) {
  options.validate();
  cluster.validate();
  Topology topology;
  topology.num_workers = cluster.num_workers;
  topology.rank = cluster.rank;
  topology.local_rank = cluster.local_rank;
  topology.devices = parse_devices(devices.empty() ? device_of_worker(cluster) : devices);
  const auto timeout = timeout_of(options);
  Groups groups = process_group ? groups_over(process_group, cluster, topology, timeout)
                  : several     ? groups_over_hosts(*several, cluster, topology, timeout)
                                : groups_on_host(cluster, topology, timeout);
  compare_options(in_words(options), *groups.workers);
  return assemble(std::move(topology), std::move(groups), options, threads);
}

std::shared_ptr<StrategyCore> make_parameter_server(const Cluster& cluster, const std::vector<std::string>& devices,
                                                    const ServerOptions& server_options, const StrategyOptions& options,
                                                    ReplicaThreads threads) {
  options.validate();
  server_options.validate();
  cluster.validate();
  check_servers_can(options);
  check_are_cpus(devices);
  Topology topology;
  topology.num_workers = cluster.num_workers;
  topology.rank = cluster.rank;
  topology.local_rank = cluster.local_rank;
  topology.devices = parse_devices(devices);
  auto groups = groups_with_servers(cluster, server_options, topology, in_words(options), timeout_of(options));
  return assemble(std::move(topology), std::move(groups), options, threads);
}

}  // namespace muster
