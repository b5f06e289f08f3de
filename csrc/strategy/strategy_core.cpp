#include "strategy/strategy_core.h"

#include <c10/util/ScopeExit.h>

#include <chrono>
#include <thread>

#include "server/shard/server.h"

namespace muster {

StrategyCore::StrategyCore(Topology topology, Groups groups, StrategyOptions options, std::shared_ptr<ReplicaPool> pool,
                           uint64_t seed)
    : session_(std::move(topology), std::move(groups), options, std::move(pool), seed),
      sets_(session_),
      stepper_(session_, sets_),
      gradient_average_(session_) {}

StrategyCore::~StrategyCore() {
  leave_ = nullptr;  // nobody is left to tell
  close();
}

void StrategyCore::close(const std::function<void()>& poll) {
  session_.close([this] { let_go(); }, poll);
}

// Nobody is in a call, and no replica in a step.
void StrategyCore::let_go() {
  sigterm_.end();
  if (leave_) {
    is_leaving_ = true;
    const auto end = c10::make_scope_exit([this] { is_leaving_ = false; });
    leave_();
  }
  const bool had_servers = sets_.has_servers();
  sets_.end();
  gradient_average_.release();
  auto& groups = session_.groups();
  groups.gradients.clear();
  groups.step.clear();
  groups.control.clear();
  groups.workers.reset();
  groups.prepare.reset();
  // After the groups: a worker that waits in one of them for this one would never leave the server.
  if (had_servers) wait_for_leavers();
  if (groups.servers) groups.servers->embedded.reset();
}

// Other workers may need the server that this process hosts.
void StrategyCore::wait_for_leavers() const {
  const auto& servers = session_.groups().servers;
  const auto embedded = servers ? servers->embedded : nullptr;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(session_.options().timeout);
  while (embedded && !embedded->is_deserted() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

std::vector<std::vector<at::Tensor>> StrategyCore::state_on_servers(const std::vector<int>& parameters,
                                                                    std::span<const server::Part> parts, bool to_stay) {
  if (!is_leaving_) session_.check_open();
  return sets_.state_on_servers(parameters, parts, to_stay);
}

}  // namespace muster
