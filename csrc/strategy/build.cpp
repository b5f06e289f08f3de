#include "strategy/build.h"

#include <ATen/Context.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sched.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <chrono>
#include <functional>
#include <iterator>
#include <numeric>
#include <sstream>
#include <utility>

#include "comm/c10d/communicator.h"
#include "comm/nccl/nccl.h"
#include "comm/shared/host_mesh.h"
#include "comm/text_exchange.h"
#include "core/heap.h"
#include "core/log.h"
#include "device/device.h"
#include "kernels/cuda/cuda_kernels.h"
#include "muster/error.h"
#include "net/rendezvous.h"
#include "net/unix_socket.h"
#include "server/protocol/address.h"

namespace muster {

namespace {

int num_cuda_devices() {
  if (!kernels::cuda::is_built() || !c10::impl::hasDeviceGuardImpl(c10::kCUDA)) return 0;
  return c10::impl::getDeviceGuardImpl(c10::kCUDA)->deviceCount();
}

c10::Device parse_device(const std::string& name) {
  c10::Device device(c10::kCPU);
  try {
    device = c10::Device(name);
  } catch (const c10::Error&) {
    throw InvalidArgument("'" + name + "' is not a device; write \"cuda:0\", \"cpu\", \"cpu:0\", \"cpu:1\", ...");
  }
  if (device.is_cpu()) return c10::Device(c10::kCPU);
  if (!device.is_cuda()) {
    throw NotBuilt("device '" + name + "' needs a build of muster with its backend; there are the CPU and CUDA");
  }
  if (!kernels::cuda::is_built()) {
    throw NotBuilt("device '" + name +
                   "' needs a build of muster with CUDA; rebuild it with -DMUSTER_CUDA=ON, where nvcc and a CUDA build "
                   "of torch are installed, or use CPU devices");
  }
  if (device.index() < 0) device.set_index(0);
  if (device.index() >= num_cuda_devices()) {
    throw InvalidArgument("device '" + name + "' is not there: this process sees " +
                          std::to_string(num_cuda_devices()) + " CUDA device(s)");
  }
  return device;
}

std::vector<c10::Device> parse_devices(const std::vector<std::string>& names) {
  std::vector<c10::Device> devices;
  for (const auto& name : names) devices.push_back(parse_device(name));
  if (devices.empty()) devices.emplace_back(c10::kCPU);
  for (const auto& device : devices) {
    if (device.type() == devices.front().type()) continue;
    throw InvalidArgument("one strategy's replicas are all on the CPU or all on CUDA devices; this one has " +
                          devices.front().str() + " and " + device.str());
  }
  return devices;
}

std::vector<std::string> all_cuda_devices() {
  std::vector<std::string> names;
  for (int i = 0; i < num_cuda_devices(); ++i) names.push_back("cuda:" + std::to_string(i));
  return names;
}

std::vector<std::string> device_of_worker(const Cluster& cluster) {
  if (num_cuda_devices() == 0) return {};
  return {"cuda:" + std::to_string(cluster.local_rank)};
}

bool has_repeated(const std::vector<c10::Device>& devices) {
  for (auto device = devices.begin(); device != devices.end(); ++device) {
    if (std::find(devices.begin(), device, *device) != device) return true;
  }
  return false;
}

comm::Milliseconds timeout_of(const StrategyOptions& options) {
  return comm::Milliseconds(static_cast<int64_t>(options.timeout * 1000));
}

int usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  return sched_getaffinity(0, sizeof cores, &cores) == 0 ? std::max(CPU_COUNT(&cores), 1) : 1;
}

std::string host_name() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

std::string in_words(const StrategyOptions& options) {
  std::ostringstream out;
  const auto show = [&](const char* name, const auto& value) {
    out << name << '=';
    if (value) {
      out << *value;
    } else {
      out << "unset";
    }
    out << ' ';
  };
  constexpr const char* kPrecisions[] = {"fp32", "bf16", "fp16"};
  out << "precision=" << kPrecisions[static_cast<size_t>(options.precision)] << " loss_scale=";
  if (options.loss_scale) {
    const auto& scale = *options.loss_scale;
    out << scale.init << ',' << scale.growth << ',' << scale.backoff << ',' << scale.interval << ' ';
  } else {
    out << "unset ";
  }
  out << "fuse=" << options.fuse << " keep_gradients=" << options.keep_gradients
      << " shard_optimizer=" << options.shard_optimizer << ' ';
  out << "accumulate=" << options.accumulate << " drop_incomplete=" << options.drop_incomplete << ' ';
  show("clip_norm", options.clip_norm);
  out << "clip_norm_type=" << options.clip_norm_type << ' ';
  show("clip_value", options.clip_value);
  show("seed", options.seed);
  out << "buffers=" << (options.buffers == Buffers::mean ? "mean" : "chief") << ' ';
  show("threads_per_replica", options.threads_per_replica);
  show("bucket_bytes", options.bucket_bytes);
  out << "wire=" << (options.wire == Wire::bf16 ? "bf16" : "unset") << ' ';
  out << "max_skipped=" << options.max_skipped << " timeout=" << options.timeout;
  return out.str();
}

int64_t broadcast_number(comm::Communicator& workers, int64_t number) {
  const auto value = at::zeros({1}, at::kLong);
  value.data_ptr<int64_t>()[0] = number;
  workers.broadcast(value, 0).wait();
  return value.const_data_ptr<int64_t>()[0];
}

void place_replicas(Topology& topology, comm::Communicator& workers) {
  const auto local = at::zeros({1}, at::kLong);
  local.data_ptr<int64_t>()[0] = topology.local_replicas();
  auto work = workers.all_gather(local);
  work.wait();
  topology.replicas_of_worker.clear();
  for (const auto& count : work.outputs()) {
    topology.replicas_of_worker.push_back(static_cast<int>(count.const_data_ptr<int64_t>()[0]));
  }
  const auto first = topology.replicas_of_worker.begin();
  topology.first_replica = std::accumulate(first, first + topology.rank, 0);
  topology.num_replicas = std::accumulate(first, topology.replicas_of_worker.end(), 0);
}

// Of two texts that in_words made: the words of one that the other has otherwise.
std::string different_words(const std::string& of, const std::string& than) {
  const auto words_of = [](const std::string& text) {
    std::istringstream in(text);
    return std::vector<std::string>(std::istream_iterator<std::string>(in), {});
  };
  const auto others = words_of(than);
  std::string different;
  for (const auto& word : words_of(of)) {
    if (std::find(others.begin(), others.end(), word) == others.end())
      different += (different.empty() ? "" : " ") + word;
  }
  return different;
}

void compare_options(const std::string& chiefs, int rank, const std::string& options) {
  if (options == chiefs) return;
  throw InvalidArgument("the ranks have different options: rank 0 has " + different_words(chiefs, options) + ", rank " +
                        std::to_string(rank) + " has " + different_words(options, chiefs) +
                        "; pass the same everywhere");
}

void compare_options(const std::string& options, comm::Communicator& workers) {
  const auto texts = exchange_texts(workers, options);
  for (size_t r = 1; r < texts.size(); ++r) compare_options(texts[0], static_cast<int>(r), texts[r]);
}

// The chief's usable cores over the replicas on its host.
int agree_on_threads(const StrategyOptions& options, const Topology& topology, comm::Communicator& workers) {
  const auto hosts = exchange_texts(workers, host_name());
  int beside_chief = 0;
  for (size_t r = 0; r < hosts.size(); ++r) {
    if (hosts[r] == hosts[0]) beside_chief += topology.replicas_of_worker[r];
  }
  const int threads = options.threads_per_replica.value_or(std::max(usable_cores() / beside_chief, 1));
  return static_cast<int>(broadcast_number(workers, threads));
}

uint64_t agree_on_seed(const StrategyOptions& options, comm::Communicator& workers) {
  const uint64_t ambient = at::globalContext().defaultGenerator(c10::Device(c10::kCPU)).current_seed();
  return static_cast<uint64_t>(broadcast_number(workers, static_cast<int64_t>(options.seed.value_or(ambient))));
}

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
  if (topology.devices.front().is_cpu()) keep_freed_memory();
  auto pool = std::make_shared<ReplicaPool>(topology.local_replicas(), threads);
  if (replica_threads == ReplicaThreads::own) pool->start();
  set_log_rank(topology.rank, topology.num_workers);
  log(LogLevel::info, std::to_string(topology.num_replicas) + " replicas in " + std::to_string(topology.num_workers) +
                          " workers, " + std::to_string(threads) + " intra-op threads each");
  return std::make_shared<StrategyCore>(std::move(topology), std::move(groups), options, std::move(pool), seed);
}

std::vector<comm::NcclOptions> with_control(const std::vector<comm::CommunicatorPtr>& control,
                                            comm::Milliseconds timeout) {
  std::vector<comm::NcclOptions> options;
  for (const auto& handle : control) {
    options.emplace_back();
    options.back().timeout = timeout;
    options.back().control = handle;
  }
  return options;
}

// The groups of this process's replicas, where all replicas are here.
Groups groups_in_process(const std::vector<c10::Device>& devices, comm::Milliseconds timeout) {
  const int replicas = static_cast<int>(devices.size());
  const auto device = devices.front();
  Groups groups;
  groups.workers = comm::make_single();
  if (!is_streamed(device)) {
    groups.gradients = comm::make_local(replicas, timeout);
    groups.step = comm::make_local(replicas, timeout);
    groups.backend = "the memory of this process";
    return groups;
  }
  groups.workers = comm::make_staged(groups.workers, device);
  groups.control = comm::make_local(replicas, timeout);
  const bool shares_device = has_repeated(devices);  // which NCCL refuses
  const auto make = [&](const std::string& name) -> std::vector<comm::CommunicatorPtr> {
    if (replicas == 1) return {comm::make_single(device)};
    if (device.is_cpu()) return comm::make_local(replicas, timeout);
    const auto options = with_control(comm::make_local(replicas, timeout), timeout);
    if (shares_device) return comm::make_device_local(devices, options);
    c10d::PrefixStore prefixed(name, c10::make_intrusive<c10d::HashStore>());
    return comm::make_nccl(prefixed, 0, replicas, devices, options);
  };
  groups.gradients = make("gradients");
  groups.step = make("step");
  groups.backend = replicas == 1   ? "nothing: there is one replica"
                   : shares_device ? "the memory of this process's devices"
                                   : "NCCL";
  return groups;
}

// Gradients and the step's collectives over NCCL, where the groups of the host carry what replicas tell one another.
void use_nccl(Groups& groups, const net::StorePtr& store, const Topology& topology,
              const std::function<std::vector<comm::CommunicatorPtr>(const std::string& name)>& make_control,
              comm::Milliseconds timeout) {
  groups.workers = comm::make_staged(groups.workers, topology.devices.front());
  groups.control = make_control("control");
  const auto make = [&](const std::string& name) -> std::vector<comm::CommunicatorPtr> {
    if (topology.num_replicas == 1) return {comm::make_single(topology.devices.front())};
    c10d::PrefixStore prefixed("nccl_" + name, store);
    return comm::make_nccl(prefixed, topology.first_replica, topology.num_replicas, topology.devices,
                           with_control(make_control(name + "_control"), timeout));
  };
  groups.gradients = make("gradients");
  groups.step = make("step");
  groups.backend = topology.num_replicas == 1 ? "nothing: there is one replica" : "NCCL";
  groups.overlap = true;
}

std::shared_ptr<comm::HostMesh> connect(const net::StorePtr& store, const std::string& prefix, const Topology& topology,
                                        int replicas, comm::Milliseconds timeout) {
  c10d::PrefixStore prefixed(prefix, store);
  return comm::HostMesh::connect(
      prefixed, {.rank = topology.rank, .num_workers = topology.num_workers, .replicas = replicas, .timeout = timeout});
}

Groups groups_on_host(const Cluster& cluster, Topology& topology, comm::Milliseconds timeout) {
  const auto store = net::open_store(cluster, timeout);
  const auto workers = connect(store, "workers", topology, 1, timeout);
  Groups groups;
  groups.workers = workers->make_group("workers").front();
  groups.backend = "memory that the processes of this host share";
  place_replicas(topology, *groups.workers);
  const bool one_each = topology.num_replicas == topology.num_workers;
  const auto replicas = one_each ? workers : connect(store, "replicas", topology, topology.local_replicas(), timeout);
  if (topology.devices.front().is_cuda()) {
    use_nccl(groups, store, topology, [&](const std::string& name) { return replicas->make_group(name); }, timeout);
    return groups;
  }
  groups.gradients = replicas->make_group("gradients");
  groups.step = replicas->make_group("step");
  return groups;
}

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

void check_servers_can(const StrategyOptions& options) {
  const auto refuse = [](bool is_asked, const char* what) {
    if (is_asked) throw InvalidArgument(std::string("parameter servers step, so that workers cannot have ") + what);
  };
  refuse(!options.fuse, "fuse=False; leave it out");
  refuse(options.keep_gradients, "keep_gradients; leave it out");
  refuse(options.shard_optimizer, "shard_optimizer: the state is divided over the servers; leave it out");
  refuse(options.wire != Wire::exact, "wire: gradients travel as they are accumulated; leave it out");
}

ServerJob servers_of(const Cluster& cluster, const ServerOptions& server_options) {
  ServerJob job;
  job.staleness = server_options.staleness ? static_cast<uint32_t>(*server_options.staleness) : server::kAnyStaleness;
  for (const auto& address : cluster.servers) job.channels.push_back(server::channel_name(address));
  return job;
}

// The chief's servers where the cluster names none.
void begin_job(ServerJob& job, const server::Standing& before, const Cluster& cluster, comm::Communicator& workers) {
  using std::chrono::microseconds;
  const auto clock = std::chrono::system_clock::now().time_since_epoch();
  const auto id = std::max(before.job + 1, static_cast<uint64_t>(duration_cast<microseconds>(clock).count()));
  job.id = static_cast<uint64_t>(broadcast_number(workers, static_cast<int64_t>(id)));
  if (!job.channels.empty()) return;
  std::string name;
  if (cluster.rank == 0) {
    name = "muster-server-" + net::random_name();
    job.embedded = std::make_shared<server::ParameterServer>(server::ServerConfig{.name = name});
  }
  job.channels = {exchange_texts(workers, name).front()};
}

// None has a connection before all have met, so that who starts late is not taken for one that joins.
bool is_running(const server::Standing& standing, int rank) {
  const auto is_other = [&](uint32_t present) { return static_cast<int>(present) != rank; };
  return standing.started && std::any_of(standing.present.begin(), standing.present.end(), is_other);
}

void join_job(Groups& groups, ServerJob& job, const server::Standing& standing, const Topology& topology,
              const std::string& options) {
  job.joins = true;
  job.id = standing.job;
  job.facts = server::decode<JobFacts>(standing.facts);
  compare_options(job.facts.options, topology.rank, options);
  groups.prepare = comm::make_single();
  groups.workers = comm::make_refusing(
      topology.rank, topology.num_workers,
      "rank " + std::to_string(topology.rank) +
          " joined a running job of parameter servers, where workers that met at its start alone have collectives; "
          "leave reduce, gather, broadcast and barrier out, or start all workers again");
  if (job.staleness == 0) groups.step = {groups.workers};
  log(LogLevel::info, "rank " + std::to_string(topology.rank) + " joins the job that is running");
}

std::string in_words(const Cluster& cluster, const ServerOptions& server_options) {
  std::string text = " servers=";
  for (const auto& address : cluster.servers) text += address + ',';
  text += " staleness=" + (server_options.staleness ? std::to_string(*server_options.staleness) : "any");
  return text + " workers=" + std::to_string(cluster.num_workers);
}

}  // namespace

std::shared_ptr<StrategyCore> make_mirrored(const std::vector<std::string>& devices, const StrategyOptions& options,
                                            Balance balance, ReplicaThreads threads) {
  options.validate();
  Topology topology;
  topology.devices = parse_devices(devices.empty() ? all_cuda_devices() : devices);
  topology.num_replicas = topology.local_replicas();
  topology.replicas_of_worker = {topology.num_replicas};
  auto groups = groups_in_process(topology.devices, timeout_of(options));
  auto core = assemble(std::move(topology), std::move(groups), options, threads);
  if (balance == Balance::automatic) core->balance_parts();
  return core;
}

std::shared_ptr<StrategyCore> make_multi_worker(const Cluster& cluster, const std::vector<std::string>& devices,
                                                const StrategyOptions& options, ReplicaThreads threads,
                                                const c10::intrusive_ptr<c10d::ProcessGroup>& process_group) {
  options.validate();
  cluster.validate();
  Topology topology;
  topology.num_workers = cluster.num_workers;
  topology.rank = cluster.rank;
  topology.local_rank = cluster.local_rank;
  topology.devices = parse_devices(devices.empty() ? device_of_worker(cluster) : devices);
  Groups groups = process_group ? groups_over(process_group, cluster, topology, timeout_of(options))
                                : groups_on_host(cluster, topology, timeout_of(options));
  compare_options(in_words(options), *groups.workers);
  return assemble(std::move(topology), std::move(groups), options, threads);
}

std::shared_ptr<StrategyCore> make_parameter_server(const Cluster& cluster, const ServerOptions& server_options,
                                                    const StrategyOptions& options, ReplicaThreads threads) {
  options.validate();
  server_options.validate();
  cluster.validate();
  check_servers_can(options);
  Topology topology;
  topology.num_workers = topology.num_replicas = cluster.num_workers;
  topology.rank = topology.first_replica = cluster.rank;
  topology.local_rank = cluster.local_rank;
  topology.replicas_of_worker.assign(static_cast<size_t>(cluster.num_workers), 1);
  topology.devices = {c10::Device(c10::kCPU)};
  const auto timeout = timeout_of(options);
  const bool steps_together = server_options.staleness == 0;
  const auto words = in_words(options) + in_words(cluster, server_options);
  Groups groups;
  groups.gradients = {comm::make_single()};
  groups.step = {comm::make_single()};
  groups.workers = comm::make_single();
  auto& job = groups.servers.emplace(servers_of(cluster, server_options));
  server::Standing standing;
  if (!cluster.servers.empty()) {
    standing = server::inquire(job.channels.front(), server::kPatience).value_or(server::Standing{});
  }
  if (is_running(standing, cluster.rank)) {
    join_job(groups, job, standing, topology, words);
  } else {
    if (cluster.num_workers > 1) {
      const auto mesh = connect(net::open_store(cluster, timeout), "workers", topology, 1, timeout);
      groups.workers = mesh->make_group("workers").front();
      compare_options(words, *groups.workers);
      if (steps_together) groups.step = mesh->make_group("step");
    }
    job.facts.options = words;
    begin_job(job, standing, cluster, *groups.workers);
  }
  const size_t count = job.channels.size();
  groups.backend = cluster.servers.empty()
                       ? "a parameter server in the chief's process"
                       : std::to_string(count) + (count == 1 ? " parameter server" : " parameter servers");
  return assemble(std::move(topology), std::move(groups), options, threads);
}

}  // namespace muster
