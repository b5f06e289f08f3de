#include "muster/cluster.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <initializer_list>
#include <string_view>

#include "core/address.h"
#include "core/flat_layout.h"
#include "core/launched.h"
#include "core/log.h"
#include "muster/error.h"

namespace muster {
namespace {

using Environment = Cluster::Environment;

/// What one launcher says of this process.
struct LauncherFacts {
  const char* launcher;
  const char* rank_name;
  const char* size_name;
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  bool all_local = false;
  std::optional<std::string> job = std::nullopt;    // equal on all ranks and different between jobs
  std::optional<std::string> nodes = std::nullopt;  // Slurm's node list
};

std::optional<std::string> get(const Environment& environment, const char* name) {
  auto value = environment(name);
  if (value && value->empty()) return std::nullopt;
  return value;
}

std::optional<std::string> first_of(const Environment& environment, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (auto value = get(environment, name)) return value;
  }
  return std::nullopt;
}

std::string quote(const char* name, const std::optional<std::string>& value) {
  return value ? std::string(name) + "=" + *value : std::string(name) + " (unset)";
}

std::string quote(const char* name, int value) { return std::string(name) + "=" + std::to_string(value); }

int integer(const char* name, const std::string& text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw InvalidArgument(std::string(name) + "=" + text + " is not an integer; set it to one, or unset it");
  }
  return number;
}

std::optional<int> get_integer(const Environment& environment, const char* name) {
  const auto text = get(environment, name);
  return text ? std::optional(integer(name, *text)) : std::nullopt;
}

int required(const Environment& environment, const char* name, const char* because) {
  if (const auto number = get_integer(environment, name)) return *number;
  throw InvalidArgument(std::string(because) + " is set but " + name + " is not; set both, or neither");
}

void check_place(const LauncherFacts& launch) {
  if (launch.size < 1 || launch.rank < 0 || launch.rank >= launch.size) {
    throw InvalidArgument(quote(launch.rank_name, launch.rank) + " and " + quote(launch.size_name, launch.size) +
                          " contradict each other: a rank lies in [0, " + launch.size_name + "); set both anew");
  }
}

std::optional<std::string> slurm_step(const Environment& environment) {
  return first_of(environment, {"SLURM_STEP_ID", "SLURM_STEPID"});
}

/// True for a task of srun. The shells of sbatch and salloc have SLURM_PROCID too, but no step of their own or one of
/// the reserved numbers from 0xfffffff0 on (slurm.h: SLURM_BATCH_SCRIPT, SLURM_INTERACTIVE_STEP, ...).
bool is_slurm_task(const Environment& environment) {
  const auto step = slurm_step(environment);
  if (!step || !get(environment, "SLURM_PROCID")) return false;
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(step->data(), step->data() + step->size(), number);
  if (error != std::errc() || end != step->data() + step->size()) {
    throw InvalidArgument("SLURM_STEP_ID=" + *step + " is not an integer; unset it to leave Slurm's variables aside");
  }
  return number < 0xfffffff0ULL;
}

std::optional<std::string> slurm_nodes(const Environment& environment) {
  return first_of(environment, {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"});
}

LauncherFacts slurm(const Environment& environment) {
  // SLURM_NTASKS can be the allocation's; the step knows better.
  const char* size_name = get(environment, "SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  LauncherFacts launch{"slurm", "SLURM_PROCID", size_name};
  launch.rank = required(environment, "SLURM_PROCID", "SLURM_STEP_ID");
  launch.size = required(environment, size_name, "SLURM_PROCID");
  launch.local_rank = required(environment, "SLURM_LOCALID", "SLURM_PROCID");
  if (const auto job = first_of(environment, {"SLURM_JOB_ID", "SLURM_JOBID"})) {
    launch.job = *job + "." + slurm_step(environment).value_or("");
  }
  launch.nodes = slurm_nodes(environment);
  return launch;
}

// Of an MPI launcher, whose ranks come from `launch`'s names.
LauncherFacts mpi(const Environment& environment, LauncherFacts launch, const char* local_rank, const char* local_size,
                  std::initializer_list<const char*> jobs) {
  launch.rank = required(environment, launch.rank_name, launch.size_name);
  launch.size = required(environment, launch.size_name, launch.rank_name);
  launch.local_rank = required(environment, local_rank, launch.rank_name);
  launch.all_local = get_integer(environment, local_size) == launch.size;
  launch.job = first_of(environment, jobs);
  launch.nodes = first_of(environment, {"SLURM_JOB_NODELIST", "SLURM_NODELIST"});
  return launch;
}

LauncherFacts open_mpi(const Environment& environment) {
  // Ranks on mpirun's own node are no tasks of its daemons' step, so that only Slurm's job is common to all.
  return mpi(environment, {"openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}, "OMPI_COMM_WORLD_LOCAL_RANK",
             "OMPI_COMM_WORLD_LOCAL_SIZE", {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID"});
}

// MPICH and what descends from it (Intel MPI): the process manager Hydra. PMI_RANK alone may be Slurm's.
bool is_hydra(const Environment& environment) {
  return get(environment, "MPI_LOCALRANKID") && first_of(environment, {"PMI_RANK", "PMI_SIZE"});
}

LauncherFacts hydra(const Environment& environment) {
  return mpi(environment, {"mpich", "PMI_RANK", "PMI_SIZE"}, "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
             {"SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID"});
}

LauncherFacts torchrun(const Environment& environment) {
  LauncherFacts launch{"torchrun", "RANK", "WORLD_SIZE"};
  launch.rank = required(environment, "RANK", "WORLD_SIZE");
  launch.size = required(environment, "WORLD_SIZE", "RANK");
  launch.local_rank = get_integer(environment, "LOCAL_RANK").value_or(0);
  launch.all_local = get_integer(environment, "LOCAL_WORLD_SIZE") == launch.size;
  return launch;
}

bool torchrun_is_complete(const Environment& environment) {
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}) {
    if (!get(environment, name)) return false;
  }
  return true;
}

void check_agreement(const Environment& environment, const char* name, const char* other_name, int other) {
  const auto value = get_integer(environment, name);
  if (!value || *value == other) return;
  throw InvalidArgument(quote(name, *value) + " and " + quote(other_name, other) + " contradict each other; unset " +
                        name +
                        ", or set all of RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which then count");
}

std::optional<LauncherFacts> find_launch(const Environment& environment) {
  if (torchrun_is_complete(environment)) return torchrun(environment);
  std::optional<LauncherFacts> launch;
  if (first_of(environment, {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"})) {
    launch = open_mpi(environment);
  } else if (is_hydra(environment)) {
    launch = hydra(environment);
  } else if (is_slurm_task(environment)) {
    launch = slurm(environment);
  }
  if (launch) {
    check_agreement(environment, "RANK", launch->rank_name, launch->rank);
    check_agreement(environment, "WORLD_SIZE", launch->size_name, launch->size);
    check_agreement(environment, "LOCAL_RANK", "the launcher's local rank", launch->local_rank);
    return launch;
  }
  if (first_of(environment, {"RANK", "WORLD_SIZE"})) return torchrun(environment);
  if (first_of(environment, {"MASTER_ADDR", "MASTER_PORT"})) {
    throw InvalidArgument(
        quote("MASTER_ADDR", get(environment, "MASTER_ADDR")) + " and " +
        quote("MASTER_PORT", get(environment, "MASTER_PORT")) +
        " name a meeting place, but no rank is known; set RANK and WORLD_SIZE, start the workers with "
        "torchrun, srun or mpirun, or unset both to train alone");
  }
  return std::nullopt;
}

[[noreturn]] void refuse_nodes(const std::string& nodes) {
  throw InvalidArgument("Slurm's node list '" + nodes + "' cannot be read; set MASTER_ADDR to the host of rank 0");
}

/// The first host of a list such as "node[003-006,9],gpu1": node003.
std::string first_node(const std::string& nodes) {
  std::string host;
  size_t i = 0;
  while (i < nodes.size() && nodes[i] != ',') {
    if (nodes[i] != '[') {
      if (nodes[i] == ']') refuse_nodes(nodes);
      host += nodes[i++];
      continue;
    }
    const size_t close = nodes.find(']', i);
    const size_t end = nodes.find_first_of(",-]", i);
    if (close == std::string::npos || end == i + 1) refuse_nodes(nodes);
    host += nodes.substr(i + 1, end - i - 1);
    i = close + 1;
  }
  if (host.empty()) refuse_nodes(nodes);
  return host;
}

/// A port for a job, below the range that systems hand out by themselves (32768 and up).
uint16_t port_of(const std::string& job) { return static_cast<uint16_t>(20000 + stable_hash(job) % 10000); }

uint16_t master_port(const std::string& text) {
  const int port = integer("MASTER_PORT", text);
  if (port < 1 || port > 65535) {
    throw InvalidArgument("MASTER_PORT=" + text + " is no port; set it to a number in [1, 65535], such as 29500");
  }
  return static_cast<uint16_t>(port);
}

std::string find_address(const Environment& environment, const LauncherFacts& launch) {
  const auto host = get(environment, "MASTER_ADDR");
  const auto port = get(environment, "MASTER_PORT");
  Address address;
  if (host) {
    if (host->find('/') != std::string::npos) {
      throw InvalidArgument("MASTER_ADDR=" + *host +
                            " is no host; set it to a name or an address alone, such as node0");
    }
    const bool has_brackets = host->size() > 2 && host->front() == '[' && host->back() == ']';  // as in an address
    address.host = has_brackets ? host->substr(1, host->size() - 2) : *host;
  } else if (launch.all_local) {
    address.host = "127.0.0.1";
  } else if (launch.nodes) {
    address.host = first_node(*launch.nodes);
  } else {
    throw InvalidArgument(quote(launch.size_name, launch.size) +
                          " workers have no place to meet; set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a "
                          "free port there, the same for all of them");
  }
  if (port) {
    address.port = master_port(*port);
  } else if (launch.job) {
    address.port = port_of(*launch.job);
  } else {
    throw InvalidArgument(quote(launch.size_name, launch.size) + " workers meet on " + address.host +
                          ", but no port is known; set MASTER_PORT to a free port there, the same for all of them");
  }
  const std::string text = to_string(address);
  parse_address(text);
  return text;
}

/// Between commas; what is there is validate()'s matter.
std::vector<std::string> find_servers(const Environment& environment) {
  std::vector<std::string> servers;
  const auto text = get(environment, "MUSTER_SERVERS");
  if (!text) return servers;
  for (size_t begin = 0; begin <= text->size();) {
    const size_t end = std::min(text->find(',', begin), text->size());
    auto server = text->substr(begin, end - begin);
    server.erase(0, server.find_first_not_of(' '));
    server.erase(server.find_last_not_of(' ') + 1);
    servers.push_back(std::move(server));
    begin = end + 1;
  }
  return servers;
}

Address parse_server(const std::string& server) {
  try {
    return parse_address(server);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument("parameter servers (MUSTER_SERVERS): " + std::string(error.what()));
  }
}

std::optional<std::string> process_environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

std::string job_of(const Environment& environment) {
  // torchrun's id of a job that was given none.
  constexpr const char* kNoId = "none";
  const auto name = first_of(environment, {"MUSTER_JOB", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_JOBID"});
  return name && *name != kNoId ? name->substr(0, 256) : "";
}

}  // namespace

std::optional<Launched> find_launched() noexcept { return find_launched(process_environment); }

std::optional<Launched> find_launched(const Cluster::Environment& environment) noexcept {
  try {
    const auto launch = find_launch(environment);
    if (!launch) return std::nullopt;
    check_place(*launch);
    return Launched{launch->launcher, launch->rank, launch->size};
  } catch (const Error&) {  // from_env() says what is wrong, to a program that asks
    return std::nullopt;
  }
}

Cluster Cluster::from_env() { return from_env(process_environment); }

Cluster Cluster::from_env(const Environment& environment) {
  Cluster cluster;
  cluster.servers = find_servers(environment);
  cluster.job = job_of(environment);
  const auto launch = find_launch(environment);
  if (!launch) {
    log(LogLevel::info,
        "no launcher found (RANK, OMPI_COMM_WORLD_RANK, SLURM_STEP_ID, MPI_LOCALRANKID are unset): this is a world of "
        "one worker");
    if (const auto size = get(environment, "PMI_SIZE"); size && *size != "1") {
      log(LogLevel::warning,
          "PMI_SIZE=" + *size +
              " tells of a launcher that is not known, and this is a world of one worker, as each of "
              "its processes is; set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT");
    }
    cluster.validate();
    return cluster;
  }
  check_place(*launch);
  cluster.launcher = launch->launcher;
  cluster.rank = launch->rank;
  cluster.num_workers = launch->size;
  cluster.local_rank = launch->local_rank;
  if (cluster.num_workers > 1) {
    cluster.address = find_address(environment, *launch);
    cluster.store_is_hosted = cluster.launcher == "torchrun" &&
                              get(environment, "TORCHELASTIC_USE_AGENT_STORE") == std::optional<std::string>("True");
  }
  cluster.validate();
  return cluster;
}

void Cluster::validate() const {
  if (num_workers < 1) {
    throw InvalidArgument("num_workers is " + std::to_string(num_workers) + "; a cluster has at least one worker");
  }
  if (rank < 0 || rank >= num_workers) {
    throw InvalidArgument("rank " + std::to_string(rank) + " is not in [0, " + std::to_string(num_workers) +
                          "); number the workers from 0");
  }
  if (local_rank < 0) {
    throw InvalidArgument("local_rank " + std::to_string(local_rank) +
                          " is negative; number the workers of a host from 0");
  }
  if (num_workers > 1 || !address.empty()) parse_address(address);
  std::vector<Address> seen;
  for (const auto& server : servers) {
    const Address parsed = parse_server(server);
    if (std::find(seen.begin(), seen.end(), parsed) != seen.end()) {
      throw InvalidArgument("parameter server '" + server +
                            "' is named twice; name each server once (MUSTER_SERVERS, or Cluster's servers)");
    }
    seen.push_back(parsed);
  }
}

}  // namespace muster
