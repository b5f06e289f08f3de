#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "comm/hosts/communicator.h"
#include "comm/hosts/tcp_group.h"
#include "job/job_agreement.h"
#include "job/lost_workers.h"
#include "job/make_groups.h"
#include "job/nccl_groups.h"
#include "muster/error.h"
#include "net/tcp.h"

namespace muster {

namespace {

// Numbers hosts from 0 on, in the order of their first workers.
std::vector<int> number_hosts(const std::vector<std::string>& hosts) {
  std::map<std::string, int> numbers;
  std::vector<int> numbered;
  for (const auto& host : hosts) numbered.push_back(numbers.emplace(host, numbers.size()).first->second);
  return numbered;
}

// The workers of this one's host, with `replicas` ranks each, and what they meet in.
class Host {
 public:
  Host(const net::StorePtr& store, const std::string& name, const comm::HostsLayout& layout, const Topology& topology,
       int replicas, comm::Milliseconds timeout, bool may_abort, std::shared_ptr<comm::LostWorkers> lost)
      : layout_(layout), rank_(topology.rank), timeout_(timeout), may_abort_(may_abort), lost_(std::move(lost)) {
    const int host = layout.host_of_worker(rank_);
    const auto& workers = layout.workers_of_host(host);
    const auto place = std::find(workers.begin(), workers.end(), rank_) - workers.begin();
    c10d::PrefixStore prefixed(name + "/" + std::to_string(host), store);
    mesh_ = comm::HostMesh::connect(prefixed, {.rank = static_cast<int>(place),
                                               .num_workers = static_cast<int>(workers.size()),
                                               .replicas = replicas,
                                               .timeout = timeout,
                                               .worker_names = workers,
                                               .replica_names = layout.ranks_of_host(host)});
  }

  std::vector<comm::CommunicatorPtr> make_group(const std::string& name, const comm::ProcessGroupPtr& exchange,
                                                const comm::ProcessGroupPtr& results) {
    return comm::make_over_hosts(layout_, rank_,
                                 {.exchange = exchange,
                                  .results = results,
                                  .up = mesh_->make_group(name),
                                  .down = mesh_->make_group(name + "_back"),
                                  .lost = lost_,
                                  .may_abort = may_abort_},
                                 /*check=*/false, timeout_);
  }

 private:
  const comm::HostsLayout layout_;
  const int rank_;
  const comm::Milliseconds timeout_;
  const bool may_abort_;
  const std::shared_ptr<comm::LostWorkers> lost_;
  std::shared_ptr<comm::HostMesh> mesh_;
};

}  // namespace

std::vector<std::string> tell_workers(const Cluster& cluster, const std::string& text, comm::Milliseconds timeout) {
  const auto store = net::open_store(cluster, timeout);
  std::vector<std::string> keys;
  std::vector<std::string> who;
  for (int worker = 0; worker < cluster.num_workers; ++worker) {
    keys.push_back("told/" + std::to_string(worker));
    who.push_back("worker " + std::to_string(worker));
  }
  net::set_text(*store, keys[static_cast<size_t>(cluster.rank)], text);
  return net::get_texts(*store, keys, who, timeout);
}

namespace {

// What a worker tells the others before they connect.
struct Whereabouts {
  std::string host;     // see net::host_identity
  std::string address;  // by which the other hosts reach it; empty where there is a problem
  std::string problem;

  static Whereabouts here(const Cluster& cluster) {
    Whereabouts mine{net::host_identity(), "", ""};
    try {
      mine.address = net::address_towards(net::split_address(cluster.address));
    } catch (const CommError& error) {
      mine.problem = error.what();
    }
    if (net::is_loopback(mine.address)) {
      mine.problem = cluster.address +
                     " is its host's loopback, by which no other host comes; set MASTER_ADDR (torchrun: "
                     "--local-addr) to an address of rank 0's host that all hosts reach, or mend /etc/hosts there";
    }
    return mine;
  }

  std::string text() const { return host + "\n" + address + "\n" + problem; }
  static Whereabouts of(const std::string& text) {
    const size_t first = text.find('\n');
    const size_t second = text.find('\n', first + 1);
    return {text.substr(0, first), text.substr(first + 1, second - first - 1), text.substr(second + 1)};
  }
};

}  // namespace

std::optional<SeveralHosts> connect_hosts(const Cluster& cluster, comm::Milliseconds timeout) {
  if (cluster.num_workers == 1) return std::nullopt;
  const auto mine = Whereabouts::here(cluster);
  std::vector<std::string> problems;
  SeveralHosts several;
  for (const auto& text : tell_workers(cluster, mine.text(), timeout)) {
    const auto theirs = Whereabouts::of(text);
    if (!theirs.problem.empty()) {
      problems.push_back("worker " + std::to_string(several.hosts.size()) + ": " + theirs.problem);
    }
    several.hosts.push_back(theirs.host);
  }
  const comm::HostsLayout layout(std::vector<int>(several.hosts.size(), 1), number_hosts(several.hosts));
  if (layout.num_hosts() == 1) return std::nullopt;
  // All workers say so together.
  if (!problems.empty()) throw InvalidArgument("the workers are on several hosts, and " + problems.front());
  const comm::TcpPlace place{.rank = cluster.rank,
                             .size = cluster.num_workers,
                             .peers = layout.fellow_carriers(cluster.rank),
                             .address = mine.address};
  several.may_abort = true;
  several.store = net::open_store(cluster, timeout);
  const auto make = [&](const std::string& name) {
    c10d::PrefixStore prefixed("between_" + name, several.store);
    return comm::make_tcp_group(prefixed, place, timeout);
  };
  several.workers = make("workers");
  several.workers_results = make("workers_results");
  several.step = make("step");
  several.gradients = make("gradients");
  several.results = make("results");
  return several;
}

Groups groups_over_hosts(const SeveralHosts& several, const Cluster& cluster, Topology& topology,
                         comm::Milliseconds timeout) {
  const auto store = several.store ? several.store : net::open_store(cluster, timeout);
  const auto host_of_worker = number_hosts(several.hosts);
  const comm::HostsLayout of_workers(std::vector<int>(several.hosts.size(), 1), host_of_worker);
  Groups groups;
  groups.store = store;
  groups.lost = make_lost_workers(store, cluster.rank, cluster.num_workers, timeout);
  Host workers(store, "workers", of_workers, topology, 1, timeout, several.may_abort, groups.lost);
  groups.workers = workers.make_group("workers", several.workers, several.workers_results).front();
  groups.backend = "memory that the processes of a host share, and between " + std::to_string(of_workers.num_hosts()) +
                   " hosts a process group (" + several.gradients->getBackend(c10::kCPU)->getBackendName() +
                   "), of which " + std::to_string(of_workers.num_stripes()) + " workers a host carry a part each";
  place_replicas(topology, *groups.workers);
  const comm::HostsLayout layout(topology.replicas_of_worker, host_of_worker);
  Host replicas(store, "replicas", layout, topology, topology.local_replicas(), timeout, several.may_abort,
                groups.lost);
  if (topology.devices.front().is_cuda()) {
    // What the replicas of all hosts tell one another, each kind over a process group that nothing else goes through.
    const std::map<std::string, comm::ProcessGroupPtr> between{
        {"control", several.gradients}, {"gradients_control", several.results}, {"step_control", several.step}};
    const auto make_control = [&](const std::string& name) {
      return replicas.make_group(name, between.at(name), between.at(name));
    };
    use_nccl(groups, store, topology, make_control, timeout);
    groups.backend += ", on " + std::to_string(layout.num_hosts()) + " hosts";
    return groups;
  }
  groups.gradients = replicas.make_group("gradients", several.gradients, several.results);
  groups.step = replicas.make_group("step", several.step, several.step);
  return groups;
}

}  // namespace muster
