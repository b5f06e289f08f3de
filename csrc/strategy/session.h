// What a strategy runs on from its start to its end: who takes part and how they meet, the prepared tensors, and the
// gate of its calls.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/balance.h"
#include "job/topology.h"
#include "muster/options.h"
#include "strategy/call_gate.h"
#include "strategy/failures.h"
#include "strategy/random_streams.h"
#include "strategy/replica_pool.h"
#include "window/parameter_registry.h"

namespace muster {

/// Externally synchronised: one thread prepares and steps. Functions marked "in a step" are called by replica threads,
/// those of the gate by any. Its address is the identity of the strategy in ReplicaContext::strategy.
class Session {
 public:
  Session(Topology topology, Groups groups, StrategyOptions options, std::shared_ptr<ReplicaPool> pool, uint64_t seed);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  const Topology& topology() const noexcept { return topology_; }
  const StrategyOptions& options() const noexcept { return options_; }
  /// Once the strategy is closed, without communicators: what else they know stays.
  Groups& groups() noexcept { return groups_; }
  const Groups& groups() const noexcept { return groups_; }
  ParameterRegistry& registry() noexcept { return registry_; }
  const ParameterRegistry& registry() const noexcept { return registry_; }
  RandomStreams& streams() noexcept { return streams_; }
  ReplicaPool& pool() const noexcept { return *pool_; }
  Failures& failures() noexcept { return failures_; }
  /// Whether flat optimizers step what they own, into the memory of all; see divides_steps().
  bool divides_steps() const noexcept { return divides_steps_; }

  /// The group for collectives outside steps; `call`: what the program has called. Throws InvalidArgument as enter()
  /// does.
  comm::Communicator& workers(std::string_view call);
  /// Likewise, for what prepare agrees on with the other workers; of one where this worker joins a running job.
  comm::Communicator& to_prepare();

  /// Divides batches by the speed of the local replicas from the next one on. No-op for one replica.
  void balance_parts();
  /// Null: parts are equal.
  Balancer* balancer() noexcept { return balancer_.get(); }
  /// The share of a batch that each local replica gets; empty where parts are equal. Thread-safe.
  std::vector<double> capacities() const { return balancer_ ? balancer_->capacities() : std::vector<double>{}; }

  /// In a step: the calling replica's local index, or -1 outside this strategy's step.
  int current_local_replica() const;

  /// Whether replicas still run a step that was interrupted; until they end, step, run and flush throw CommError.
  bool busy() const { return pool_->busy(); }

  /// Ends the replicas' groups: peers that wait in them, or come to them, hear this reason.
  void abort_groups(const std::string& reason) noexcept;

  /// While it lives, close() waits. For calls of other threads, and for what those return by reference. Throws
  /// InvalidArgument after close(), and in a child that one of several workers has forked.
  [[nodiscard]] CallGate::Pass enter();
  /// Likewise, for step, run and flush. Throws InvalidArgument inside a step, and where another thread is in one of
  /// them.
  [[nodiscard]] CallGate::Pass enter_alone(const char* what);
  /// Throws InvalidArgument once the strategy is closed.
  void check_open() const;
  /// Likewise, and inside a step; throws CommError while replicas are busy.
  void check_callable() const;
  bool closed() const noexcept { return gate_.is_shut(); }

  /// Shuts the gate, waits until nobody is in a call and no replica in a step, and calls `last`. See
  /// StrategyCore::close.
  void close(const std::function<void()>& last, const std::function<void()>& poll);
  /// Shuts the gate without waiting.
  void leave() noexcept;

 private:
  void check_process() const;
  void note_call(std::string_view call);
  void abort_interrupted() noexcept;

  const pid_t process_;
  Topology topology_;
  Groups groups_;
  StrategyOptions options_;
  std::shared_ptr<ReplicaPool> pool_;
  const bool divides_steps_;
  ParameterRegistry registry_;
  RandomStreams streams_;
  Failures failures_;
  std::unique_ptr<Balancer> balancer_;
  CallGate gate_;
};

}  // namespace muster
