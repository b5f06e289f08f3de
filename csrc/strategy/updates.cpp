#include "strategy/updates.h"

#include <ATen/autocast_mode.h>
#include <c10/util/ScopeExit.h>

#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/text_exchange.h"
#include "core/intra_op_threads.h"
#include "core/log.h"
#include "core/wait_hook.h"
#include "muster/error.h"

namespace muster {

uint64_t Updates::count(int set) const {
  const auto found = counts_.find(set);
  return found == counts_.end() ? 0 : found->second;
}

// Errors of hooks on servers are thrown when the step is made: the others step, too.
void Updates::make(ParameterSet& set, const StepCall& call, int64_t step) {
  const IntraOpThreads threads(session_.pool().threads_per_replica());
  was_dropped_ = false;
  stepped_ = begun_ = 0;
  const auto ended = c10::make_scope_exit([&] { stepped_ = begun_ = 0; });
  try {
    if (call.steps_flat()) {
      step_flat(set, call, step);
    } else if (call.update_from_grad) {
      call.update_from_grad();
    } else {
      note_no_optimizer(call.set);
    }
  } catch (...) {
    if (call.steps_flat() && begun_ == 0 && set.servers() == nullptr) was_dropped_ = true;
    fail_peers();
    throw;
  }
  if (!call.steps_flat()) {
    for (const int p : set.parameters()) session_.registry().note_agreed(static_cast<size_t>(p));
  }
  if (hook_error_) std::rethrow_exception(std::exchange(hook_error_, nullptr));
  at::autocast::clear_cache();
}

void Updates::step_flat(ParameterSet& set, const StepCall& call, int64_t step) {
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
                 begun_ = stepped_ + 1;
                 session_.pool().run(work, call.poll);
               });
    } catch (...) {
      errors_.rethrow({step, /*has_tail=*/true, /*in_update=*/true, stepped_});
    }
    begun_ = ++stepped_;
    ++counts_[call.set];
  }
}

// In a handler of what ended an update. Peers have what they step from, and wait for this rank's part in it.
void Updates::fail_peers() {
  if (begun_ >= awaited_) return;
  const auto failure = session_.failures().describe(std::current_exception());
  const auto reason = "rank " + std::to_string(session_.topology().rank) +
                      " failed before its part of the optimizer's step: " + failure.type + ": " + failure.text;
  session_.abort_groups(reason);
  session_.groups().workers->abort(reason);
}

void Updates::call_hooks(int number, bool fused, bool is_first, const std::function<void()>& hooks) {
  auto& set = sets_.at(number);
  const bool edits = fused && session_.options().keep_gradients && set.servers() == nullptr;
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
    failure = session_.failures().describe(error);
  }
  if (set.servers() != nullptr) {
    hook_error_ = error;  // the others step, and servers wait for this worker to
    return;
  }
  if (failure.kind == Failure::Kind::transport) std::rethrow_exception(error);
  if (session_.groups().workers->size() > 1) {
    auto told = agree_on_hooks(failure, is_first, scalars);
    if (!error) error = std::move(told);
  }
  if (!error) return;
  awaited_ = 0;  // no rank steps
  was_dropped_ = is_first;
  std::rethrow_exception(error);
}

// Collective over workers. Returns what hooks of another rank raised, as a RemoteError of the first of them.
std::exception_ptr Updates::agree_on_hooks(const Failure& failure, bool is_first, kernels::StepScalars* scalars) const {
  std::string bytes;
  if (scalars != nullptr) bytes.assign(reinterpret_cast<const char*>(scalars), sizeof *scalars);
  const auto texts =
      exchange_texts(*session_.groups().workers, failure ? 'f' + failure.type + '\n' + failure.text : 's' + bytes);
  int replica = 0;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const auto& text = texts[rank];
    if (!text.empty() && text.front() == 'f') {
      const auto end = text.find('\n');
      const auto type = text.substr(1, end - 1);
      const auto what = text.substr(end + 1);
      const std::string outcome = is_first ? "the window was dropped on all ranks and training can go on"
                                           : "optimizers before that one have stepped on all ranks, it and later ones "
                                             "on none, and training can go on";
      return std::make_exception_ptr(RemoteError(static_cast<int>(rank), replica, type, what,
                                                 "a hook before the optimizer's step on rank " + std::to_string(rank) +
                                                     " raised " + type + ": " + what + "; " + outcome));
    }
    replica += session_.topology().replicas_of_worker[rank];
  }
  // Every rank steps by what rank 0 has: its hooks may have left other means.
  if (scalars != nullptr) std::memcpy(scalars, texts.front().data() + 1, sizeof *scalars);
  return nullptr;
}

// Warns once where no parameter was written between two windows of a set without optimizers, so that the first one's
// gradients were replaced unused.
void Updates::note_no_optimizer(int number) {
  if (warned_of_no_optimizer_) return;
  std::vector<WriteTrace> traces;
  for (const int p : sets_.at(number).trainable()) {
    traces.push_back(WriteTrace::of(session_.registry().parameter(0, static_cast<size_t>(p))));
  }
  const auto [last, is_first] = traces_without_optimizer_.try_emplace(number, traces);
  if (!is_first && std::exchange(last->second, traces) == traces) {
    warned_of_no_optimizer_ = true;
    log(LogLevel::warning,
        "no optimizer is prepared, and no parameter was written between two steps: the gradients of the first were "
        "replaced unused; prepare() the optimizer, or step it by hand after each strategy step");
  }
}

}  // namespace muster
