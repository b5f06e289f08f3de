// The language-neutral heart of a strategy, from its start to its end. C++ and Python are thin layers over it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "strategy/backward_by_hand.h"
#include "strategy/parameter_sets.h"
#include "strategy/session.h"
#include "strategy/sigterm.h"
#include "strategy/stepper.h"

namespace muster {

/// Externally synchronised: one thread prepares and steps; close() and leave() are called by any.
class StrategyCore {
 public:
  StrategyCore(Topology topology, Groups groups, StrategyOptions options, std::shared_ptr<ReplicaPool> pool,
               uint64_t seed);
  ~StrategyCore();
  StrategyCore(const StrategyCore&) = delete;
  StrategyCore& operator=(const StrategyCore&) = delete;

  Session& session() noexcept { return session_; }
  const Session& session() const noexcept { return session_; }
  ParameterSets& sets() noexcept { return sets_; }
  const ParameterSets& sets() const noexcept { return sets_; }
  Stepper& stepper() noexcept { return stepper_; }
  const Stepper& stepper() const noexcept { return stepper_; }
  GradientAverage& gradient_average() noexcept { return gradient_average_; }

  /// As ParameterSets::state_on_servers, until the end of what on_leaving() was given. Throws InvalidArgument after it.
  std::vector<std::vector<at::Tensor>> state_on_servers(const std::vector<int>& parameters,
                                                        std::span<const server::Part> parts, bool to_stay);

  /// `leave` is called by close() when nobody is in a call any more, and while servers are still there. What it throws
  /// ends that close(), and the next one goes on.
  void on_leaving(std::function<void()> leave) { leave_ = std::move(leave); }
  /// Whether the calling code is called by that.
  bool is_leaving() const noexcept { return is_leaving_; }

  /// Orderly end; later calls throw InvalidArgument. Idempotent and thread-safe. Waits for calls of other threads, and
  /// for replicas that an interrupted call left behind: nothing that they use is freed. `poll` is called ten
  /// times a second or more while it waits; if it throws, the strategy stays closed to calls, and the next close() goes
  /// on. Where this process hosts a parameter server, it waits until all workers have left that; without `poll` for
  /// the timeout at most.
  /// Throws InvalidArgument inside a call of this strategy: in a step function, a hook, a signal handler.
  void close(const std::function<void()>& poll = {});

  /// As close(), without waiting: what replicas use lives until they and the last owner of this object have let go.
  void leave() noexcept { session_.leave(); }

 private:
  void let_go(const std::function<void()>& poll);
  void end_sets(const std::function<void()>& poll);
  void wait_for_leavers(const server::ParameterServer& embedded, const std::function<void()>& poll) const;

  Session session_;
  ParameterSets sets_;
  Stepper stepper_;
  GradientAverage gradient_average_;
  SigtermWatch sigterm_;
  std::function<void()> leave_;
  std::atomic<bool> is_leaving_{false};
  bool awaits_leavers_ = false;
};

}  // namespace muster
