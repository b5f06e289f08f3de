#include "strategy/strategy_core.h"

#include <c10/util/ScopeExit.h>

#include <chrono>
#include <exception>
#include <optional>
#include <string>
#include <thread>

#include "core/log.h"
#include "core/wait_hook.h"
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
  session_.close([&] { let_go(poll); }, poll);
}

// Nobody is in a call, and no replica in a step. Where something throws, the next close() goes on from there.
void StrategyCore::let_go(const std::function<void()>& poll) {
  sigterm_.end();
  if (leave_) {
    is_leaving_ = true;
    const auto end = c10::make_scope_exit([this] { is_leaving_ = false; });
    leave_();
    leave_ = nullptr;
  }
  awaits_leavers_ = awaits_leavers_ || sets_.has_servers();
  end_sets(poll);
  gradient_average_.release();
  auto& groups = session_.groups();
  groups.gradients.clear();
  groups.step.clear();
  groups.control.clear();
  groups.workers.reset();
  groups.prepare.reset();
  // After the groups: a worker that waits in one of them for this one would never leave the server.
  if (!groups.servers) return;
  if (awaits_leavers_ && groups.servers->embedded) wait_for_leavers(*groups.servers->embedded, poll);
  groups.servers->embedded.reset();
  groups.servers->seat.reset();
}

// What servers have is brought back where they answer, which `poll` may interrupt; the sets end all the same.
void StrategyCore::end_sets(const std::function<void()>& poll) {
  std::exception_ptr interrupt;
  const auto noting = [&] {
    try {
      poll();
    } catch (...) {
      interrupt = std::current_exception();
      throw;
    }
  };
  std::optional<WaitHook> hook;
  if (poll) hook.emplace(noting);
  sets_.end();
  if (interrupt) std::rethrow_exception(interrupt);
}

// Other workers may train on the server that this process hosts for as long as they like. Where nobody can interrupt
// the wait, it ends after the timeout.
void StrategyCore::wait_for_leavers(const server::ParameterServer& embedded, const std::function<void()>& poll) const {
  using Clock = std::chrono::steady_clock;
  const std::chrono::duration<double> timeout(session_.options().timeout);
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout);
  bool is_told = false;
  while (embedded.is_own() && !embedded.is_deserted()) {
    if (poll) poll();
    if (!is_told && Clock::now() >= deadline) {
      is_told = true;
      log(LogLevel::warning,
          "other workers have not left the parameter server that this process hosts" +
              std::string(poll ? ", and it waits for them; close() their strategies, or interrupt it"
                               : ", which ends now; close() strategies, so that they are waited for"));
      if (!poll) return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

std::vector<std::vector<at::Tensor>> StrategyCore::state_on_servers(const std::vector<int>& parameters,
                                                                    std::span<const server::Part> parts, bool to_stay) {
  if (!is_leaving_) session_.check_open();
  return sets_.state_on_servers(parameters, parts, to_stay);
}

}  // namespace muster
