// ParameterServerStrategy: workers, and servers that hold the parameters.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "muster/cluster.h"
#include "muster/options.h"
#include "muster/strategy.h"

namespace muster {

/// A value. Every worker passes the same.
struct ServerOptions {
  /// Steps that a worker may be ahead of the slowest live one. 0: synchronous, each step made of all workers' parts.
  /// Else every worker steps on its own, from whole batches. Empty: asynchronous, any number of steps.
  std::optional<int> staleness = 0;
  /// Bytes of a worker's log: what it pushed and a server that starts again from a snapshot may lack. Where it is full,
  /// the worker waits for a snapshot. Empty: 256 MiB (1 GiB with tables on servers) or eight steps, whichever is more,
  /// and at most an eighth of the memory.
  std::optional<int64_t> log_bytes = {};
  /// Seconds that a server may be gone; while it reads its snapshot it is not. One that says nothing though its process
  /// listens (it was stopped, say, or its machine pauses) has 30 s, or these if that is more.
  double patience = 5;
  /// Seconds without a sign of life after which a worker, or a server, counts as dead.
  double heartbeat = 5;
  /// Ends a job that others train on the servers. Without it a job that has another name (Cluster::job) is refused as
  /// long as they give signs of life.
  bool takeover = false;

  /// Throws InvalidArgument where staleness or log_bytes is negative, and patience or heartbeat not in [0.01, 86400].
  void validate() const;
};

/// A process a worker, each with one CPU replica or several; parameters and optimizer state live on parameter servers,
/// which step. Gradients of a worker's replicas are added in its process, and pushed once: for servers, and in
/// everything said of workers here, they are one. The servers are those of the cluster (`MUSTER_SERVERS`, `muster
/// serve`), on this host so far; without any the chief hosts one in its process until all workers have left. The
/// optimizer is one of muster::optim. Connects at the first step: where servers hold values already (a job that was
/// started again), all workers go on from them.
///
/// Synchronous, it gives the bits of MultiWorkerMirroredStrategy (with several replicas a worker, where all workers
/// have the same power of two; else sums are added in another order), and collectives inside a step work as there. A
/// worker that dies no longer counts after 5 s without a sign of life, and the others go on. Else a step is one
/// worker's: its loss, metrics, buffers and norm are its own, and collectives inside a step see it alone. A server that
/// stays away for 5 s is PeerLost; started again with its snapshots before that, it is as if nothing had happened.
///
/// Parameters must not be written between steps, and sparse gradients are refused but for a ShardedEmbedding's.
/// Constructing is collective over the cluster, unless the cluster names servers and other workers train there: it then
/// joins them, with the job's seed and the servers' values, and has no collectives outside steps. Throws
/// InvalidArgument for options that servers cannot honour (fuse=false, keep_gradients, shard_optimizer, wire), or that
/// ranks disagree about.
class ParameterServerStrategy : public Strategy {
 public:
  /// A worker of the job that `cluster` describes.
  explicit ParameterServerStrategy(const Cluster& cluster = Cluster::from_env(),
                                   const ServerOptions& server_options = {}, const StrategyOptions& options = {});

  /// Likewise, with a replica for each of `devices` ("cpu", "cpu:0", "cpu:1", ..., which may repeat; none: one). A
  /// worker that comes back has as many as before. Throws InvalidArgument for devices that are no CPUs.
  ParameterServerStrategy(const Cluster& cluster, const std::vector<std::string>& devices,
                          const ServerOptions& server_options, const StrategyOptions& options);
};

}  // namespace muster
