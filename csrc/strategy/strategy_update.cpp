// Updates at a window's end: hooks before them, the steps of optimizers, and windows without any.
#include <ATen/autocast_mode.h>
#include <c10/util/ScopeExit.h>

#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "comm/text_exchange.h"
#include "core/log.h"
#include "core/wait_hook.h"
#include "muster/error.h"
#include "strategy/strategy_core.h"

namespace muster {

// Errors of hooks on servers are thrown when the step is made: the others step, too.
void StrategyCore::update(ParameterSet& set, const StepCall& call) {
  const IntraOpThreads threads(pool_->threads_per_replica());
  applied_ = begun_ = 0;
  const auto applied = c10::make_scope_exit([&] { applied_ = begun_ = 0; });
  try {
    if (call.steps_flat()) {
      step_flat(set, call);
    } else if (call.update_from_grad) {
      call.update_from_grad();
    } else {
      note_no_optimizer(call.set);
    }
  } catch (...) {
    fail_peers_in_apply();
    throw;
  }
  if (!call.steps_flat()) {
    for (const int p : set.parameters()) registry_.note_agreed(static_cast<size_t>(p));
  }
  if (hook_error_) std::rethrow_exception(std::exchange(hook_error_, nullptr));
  at::autocast::clear_cache();
}

void StrategyCore::step_flat(ParameterSet& set, const StepCall& call) {
  std::optional<WaitHook> interruptible;
  if (call.poll) {
    interruptible.emplace(call.poll);
    call.poll();  // a signal that came in backward ends the step while nothing is written
  }
  std::vector<FlatGroups> groups;
  const auto prepare = [&] { groups = call.before_update(); };
  if (set.told().hooked) {
    call_hooks(call.set, /*fused=*/true, /*is_first=*/true, prepare);
  } else {
    prepare();
  }
  for (size_t i = 0; i < call.optimizers.size(); ++i) {
    const auto& optimizer = call.optimizers[i];
    try {
      // Where a hook raised on servers, which step all the same, there are no groups.
      set.step(*optimizer.flat, optimizer.parameters, groups.empty() ? optimizer.groups : groups.at(i),
               [&](const ReplicaPool::Task& work) {
                 begun_ = applied_ + 1;
                 pool_->run(work, call.poll);
               });
    } catch (...) {
      fail_step(/*in_apply=*/true);
    }
    begun_ = ++applied_;
    ++num_updates_[call.set];
  }
}

void StrategyCore::call_hooks(int number, bool fused, bool is_first, const std::function<void()>& hooks) {
  auto& set = *sets_.at(static_cast<size_t>(number));
  const bool edits = fused && options_.keep_gradients && set.servers() == nullptr;
  std::exception_ptr error;
  Failure failure;
  kernels::StepScalars* scalars = nullptr;  // that the host steps by; null: nothing was edited, or the device has them
  try {
    if (edits) {
      scalars = set.leave_means(hooks);
    } else {
      hooks();
    }
  } catch (...) {
    error = std::current_exception();
    failure = failures_.describe(error);
  }
  if (set.servers() != nullptr) {
    hook_error_ = error;  // the others step, and servers wait for this worker to
    return;
  }
  if (failure.kind == Failure::Kind::transport) std::rethrow_exception(error);
  if (groups_.workers->size() > 1) {
    const std::string outcome = is_first ? "the window was dropped on all ranks and training can go on"
                                         : "optimizers before that one have stepped on all ranks, it and later ones "
                                           "on none, and training can go on";
    std::string bytes;
    if (scalars != nullptr) bytes.assign(reinterpret_cast<const char*>(scalars), sizeof *scalars);
    const auto texts =
        exchange_texts(*groups_.workers, failure ? 'f' + failure.type + '\n' + failure.text : 's' + bytes);
    for (size_t rank = 0; rank < texts.size() && !error; ++rank) {
      const auto& text = texts[rank];
      if (text.empty() || text.front() != 'f') continue;
      const auto end = text.find('\n');
      const auto type = text.substr(1, end - 1);
      const auto what = text.substr(end + 1);
      int replica = 0;
      for (size_t before = 0; before < rank; ++before) replica += topology_.replicas_of_worker[before];
      error = std::make_exception_ptr(RemoteError(static_cast<int>(rank), replica, type, what,
                                                  "a hook before the optimizer's step on rank " + std::to_string(rank) +
                                                      " raised " + type + ": " + what + "; " + outcome));
    }
    // Every rank steps by what rank 0 has: its hooks may have left other means.
    if (!error && scalars != nullptr) std::memcpy(scalars, texts.front().data() + 1, sizeof *scalars);
  }
  if (!error) return;
  awaited_ = 0;  // no rank steps
  if (is_first) --steps_;
  std::rethrow_exception(error);
}

void StrategyCore::note_no_optimizer(int number) {
  if (warned_of_no_optimizer_) return;
  uint64_t versions = 0;
  for (const int p : sets_.at(static_cast<size_t>(number))->trainable())
    versions += registry_.parameter(0, static_cast<size_t>(p))._version();
  const auto [last, is_first] = versions_without_optimizer_.try_emplace(number, versions);
  if (!is_first && std::exchange(last->second, versions) == versions) {
    warned_of_no_optimizer_ = true;
    log(LogLevel::warning,
        "no optimizer is prepared, and no parameter was written between two steps: the gradients of the first were "
        "replaced unused; prepare() the optimizer, or step it by hand after each strategy step");
  }
}

}  // namespace muster
