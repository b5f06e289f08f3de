#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "comm/text_exchange.h"
#include "core/log.h"
#include "core/wait_hook.h"
#include "job/job_agreement.h"
#include "job/make_groups.h"
#include "muster/error.h"
#include "net/unix_socket.h"
#include "server/protocol/address.h"
#include "server/shard/server.h"
#include "server/worker/client.h"

namespace muster {

namespace {

ServerJob servers_of(const Cluster& cluster, const ServerOptions& server_options) {
  ServerJob job;
  job.options = server_options;
  job.staleness = server_options.staleness ? static_cast<uint32_t>(*server_options.staleness) : server::kAnyStaleness;
  for (const auto& address : cluster.servers) job.channels.push_back(server::channel_name(address));
  return job;
}

server::Standing ask_server(const ServerJob& job, size_t server) {
  const auto patience = std::chrono::milliseconds(static_cast<int64_t>(job.options.patience * 1000));
  if (auto standing = server::inquire(job.channels[server], patience)) return *std::move(standing);
  throw PeerLost(-1, server::name_of_server(server, job.channels[server]) +
                         " does not answer; start it (muster serve), or look at its log. MUSTER_SERVERS names it");
}

// The id of the last job that any server knows of: one that came back may have forgotten it.
uint64_t last_job(const ServerJob& job) {
  uint64_t last = 0;
  for (size_t s = 0; s < job.channels.size(); ++s) last = std::max(last, ask_server(job, s).job);
  return last;
}

// Greater than that of any job before on these servers, and another one than of jobs on others: who mixes the folders
// of two jobs is to be told.
uint64_t next_job(const ServerJob& job) { return ((last_job(job) >> 32) + 1) << 32 | std::random_device()(); }

// Gives the job its id and, where the cluster names no server, one that the chief's process hosts. Collective.
void begin_job(ServerJob& job, const Cluster& cluster, comm::Communicator& workers) {
  const uint64_t id = cluster.rank == 0 ? next_job(job) : 0;
  job.id = static_cast<uint64_t>(broadcast_number(workers, static_cast<int64_t>(id)));
  job.token = exchange_texts(workers, cluster.job.empty() ? net::random_name() : cluster.job).front();
  if (!job.channels.empty()) return;
  std::string name;
  if (cluster.rank == 0) {
    name = "muster-server-" + net::random_name();
    job.embedded = std::shared_ptr<server::ParameterServer>(new server::ParameterServer({.name = name}),
                                                            [](const server::ParameterServer* server) {
                                                              if (server->is_own()) delete server;
                                                            });
  }
  job.channels = {exchange_texts(workers, name).front()};
}

// Whether others train already. No worker is connected before all have met, so that who starts late is not taken for
// one that joins.
bool is_running(const server::Standing& standing, int rank) {
  const auto is_other = [&](uint32_t present) { return static_cast<int>(present) != rank; };
  return standing.started && std::any_of(standing.present.begin(), standing.present.end(), is_other);
}

// Where this process is a worker of servers that others run: a second strategy there would be taken for a worker that
// comes back, and end the first one, which is what `takes_over` asks for.
struct Seats {
  std::mutex mutex;
  std::map<std::pair<std::string, int>, std::weak_ptr<const void>> taken;  // by first server and rank; guarded by mutex
};

std::shared_ptr<const void> take_seat(const Cluster& cluster, bool takes_over) {
  static Seats seats;
  const std::lock_guard lock(seats.mutex);
  auto& taken = seats.taken[{cluster.servers.front(), cluster.rank}];
  if (!taken.expired() && !takes_over) {
    throw InvalidArgument("this process has a strategy at the parameter server " + cluster.servers.front() +
                          " already, as rank " + std::to_string(cluster.rank) +
                          "; close() it before the next one, or give that servers of its own (MUSTER_SERVERS)");
  }
  const auto seat = std::make_shared<const char>();
  taken = seat;
  return seat;
}

// What server 0 says. A worker that was killed is present for a moment longer: who is there is asked twice.
server::Standing standing_of(const Cluster& cluster, const ServerJob& job) {
  constexpr std::chrono::milliseconds kMoment{1'600};
  const auto ask = [&] { return ask_server(job, 0); };
  auto standing = ask();
  if (!is_running(standing, cluster.rank)) return standing;
  const auto until = std::chrono::steady_clock::now() + kMoment;
  while (std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    WaitHook::call();
  }
  standing = ask();
  if (is_running(standing, cluster.rank) && !cluster.job.empty() && cluster.job != standing.token &&
      !job.options.takeover) {
    throw InvalidArgument("another job (" + standing.token +
                          ") trains on these parameter servers, and this worker is of " + cluster.job +
                          "; give it servers of its own (MUSTER_SERVERS), or takeover to end that one");
  }
  return standing;
}

// As the workers that met at the job's start.
void place_as_before(Topology& topology, const JobFacts& facts) {
  topology.replicas_of_worker.assign(facts.replicas_of_worker.begin(), facts.replicas_of_worker.end());
  const int known = topology.replicas_of_worker.at(static_cast<size_t>(topology.rank));
  if (known != topology.local_replicas()) {
    throw InvalidArgument("rank " + std::to_string(topology.rank) + " had " + std::to_string(known) +
                          " replicas when the running job began, and has " + std::to_string(topology.local_replicas()) +
                          "; give it as many devices");
  }
  topology.first_replica = topology.first_replica_of(topology.rank);
  topology.num_replicas = topology.first_replica_of(topology.num_workers);
}

void join_job(Groups& groups, ServerJob& job, const server::Standing& standing, Topology& topology,
              const std::string& options) {
  job.joins = true;
  job.id = standing.job;
  job.token = standing.token;
  job.facts = server::decode<JobFacts>(standing.facts);
  compare_options("the running job", job.facts.options, "this worker", options);
  place_as_before(topology, job.facts);
  groups.prepare = comm::make_single();
  const auto reason =
      "rank " + std::to_string(topology.rank) +
      " joined a running job of parameter servers, where workers that met at its start alone have collectives; leave "
      "reduce, gather, broadcast and barrier out, or start all workers again";
  groups.workers = comm::make_refusing(topology.rank, topology.num_workers, reason);
  if (job.staleness == 0) groups.step = refusing_replicas(topology, reason);
  log(LogLevel::info, "rank " + std::to_string(topology.rank) + " joins the job that is running");
}

std::string in_words(const Cluster& cluster, const ServerOptions& server_options) {
  std::string text = " servers=";
  for (const auto& address : cluster.servers) text += address + ',';
  text += " staleness=" + (server_options.staleness ? std::to_string(*server_options.staleness) : "any");
  return text + " workers=" + std::to_string(cluster.num_workers);
}

}  // namespace

std::vector<comm::CommunicatorPtr> refusing_replicas(const Topology& topology, const std::string& reason) {
  std::vector<comm::CommunicatorPtr> replicas;
  for (int r = 0; r < topology.local_replicas(); ++r) {
    replicas.push_back(comm::make_refusing(topology.first_replica + r, topology.num_replicas, reason));
  }
  return replicas;
}

Groups groups_with_servers(const Cluster& cluster, const ServerOptions& server_options, Topology& topology,
                           const std::string& options, comm::Milliseconds timeout) {
  const bool steps_together = server_options.staleness == 0;
  const auto words = options + in_words(cluster, server_options);
  const int local = topology.local_replicas();
  // Replicas wait for the one that hears the servers, which have the timeout to say what they wait for themselves.
  const auto make_here = [&] {
    return local == 1 ? std::vector{comm::make_single()} : comm::make_local(local, 2 * timeout);
  };
  Groups groups;
  groups.gradients = make_here();
  groups.step = make_here();
  groups.workers = comm::make_single();
  auto& job = groups.servers.emplace(servers_of(cluster, server_options));
  if (!cluster.servers.empty()) job.seat = take_seat(cluster, server_options.takeover);
  const auto standing = cluster.servers.empty() ? server::Standing() : standing_of(cluster, job);
  if (is_running(standing, cluster.rank) && !server_options.takeover) {
    join_job(groups, job, standing, topology, words);
  } else {
    if (cluster.num_workers > 1) {
      const auto store = net::open_store(cluster, timeout);
      const auto workers = connect_workers(store, "workers", topology, 1, timeout);
      groups.workers = workers->make_group("workers").front();
      compare_options(words, *groups.workers);
      place_replicas(topology, *groups.workers);
      if (steps_together) {
        const auto replicas =
            topology.has_one_replica_each() ? workers : connect_workers(store, "replicas", topology, local, timeout);
        groups.step = replicas->make_group("step");
      }
    } else {
      place_replicas(topology, *groups.workers);
    }
    job.facts.options = words;
    job.facts.replicas_of_worker.assign(topology.replicas_of_worker.begin(), topology.replicas_of_worker.end());
    begin_job(job, cluster, *groups.workers);
  }
  const size_t count = job.channels.size();
  groups.backend = cluster.servers.empty()
                       ? "a parameter server in the chief's process"
                       : std::to_string(count) + (count == 1 ? " parameter server" : " parameter servers");
  return groups;
}

}  // namespace muster
