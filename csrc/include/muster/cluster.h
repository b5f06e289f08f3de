// Who takes part in a job: the address of the rendezvous and this process's place in it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace muster {

/// A value: this worker's rank among `num_workers` and where they meet.
struct Cluster {
  int rank = 0;         ///< this worker's index
  int num_workers = 1;  ///< processes of the job
  /// "host:port" of the rendezvous store ("[host]:port" for an IPv6 literal); empty in a world of one.
  std::string address;
  /// Index among the workers of this host.
  int local_rank = 0;
  /// "host:port" of each parameter server, in an order that all workers share; empty without servers.
  std::vector<std::string> servers = {};
  /// Allows traffic between hosts without a job secret.
  bool insecure = false;
  /// What tells this job from others that meet at the same address, whose workers may have other ranks there: equal on
  /// its workers, and of no other job. Empty: the n-th job of each worker at an address is one job.
  std::string meeting = "";
  /// True when the launcher (torchrun) already hosts a store at `address`; otherwise rank 0 hosts it.
  bool store_is_hosted = false;
  /// Which launcher described the job: "torchrun", "slurm", "openmpi", "mpich", "arguments" or "none".
  std::string launcher = "none";
  /// The launcher's name for the job, equal on all ranks and after the launcher started them again: MUSTER_JOB,
  /// torchrun's run id or Slurm's job id; empty where none is known. Parameter servers let a job with another name
  /// begin only once nobody trains there any more.
  std::string job = "";

  /// Whether all members are equal.
  bool operator==(const Cluster&) const = default;

  /// Looks up an environment variable; tests pass their own. An empty value counts as unset.
  using Environment = std::function<std::optional<std::string>(const char* name)>;

  /// Reads torchrun's, Slurm's (`SLURM_PROCID/NTASKS/LOCALID/...`) or Open MPI's (`OMPI_COMM_WORLD_*`) variables.
  /// A complete set of torchrun's (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT) wins, since torchrun is
  /// often started by another launcher; then Open MPI, whose daemons Slurm may have started; then Slurm, for tasks of
  /// srun only (the shell of sbatch or salloc is none). An incomplete set must agree with the launcher below it. The
  /// address is MASTER_ADDR/MASTER_PORT, else the first Slurm node with a port derived from the job id, else loopback
  /// when all ranks are on this host (Open MPI: before the Slurm node). Without a launcher: a world of one, logged in
  /// one line. Servers are MUSTER_SERVERS ("host:port,host:port,..."), whatever the launcher. Throws InvalidArgument
  /// where variables contradict each other, are incomplete or malformed, or no address follows.
  static Cluster from_env();
  /// The same, from variables that `environment` looks up.
  static Cluster from_env(const Environment& environment);

  /// Throws InvalidArgument unless 0 <= rank < num_workers, 0 <= local_rank, and an address of the form "host:port"
  /// is given when num_workers > 1; servers have that form, too, and none repeats.
  void validate() const;
};

}  // namespace muster
