// The calls of a strategy: steps, windows and errors.
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <limits>

#include "device/kernel_status.h"
#include "muster/error.h"
#include "muster/precision.h"
#include "strategy/casts.h"
#include "strategy/strategy_core.h"
#include "strategy/untouched_gradients.h"

namespace muster {

namespace {

at::Tensor host_scalar(double value) { return at::scalar_tensor(value, at::kDouble); }

// The tensors of `sums`.
StepResult result_of(const WindowSums& sums, double loss_scale) {
  if (sums.on_device) return *sums.on_device;
  StepResult result;
  result.loss = host_scalar(sums.loss);
  result.weight = host_scalar(sums.weight);
  result.skipped = at::scalar_tensor(!sums.finite, at::kBool);
  result.loss_scale = host_scalar(loss_scale);
  for (const auto& [name, value] : sums.metrics) result.metrics[name] = host_scalar(value);
  return result;
}

}  // namespace

ParameterSet& StrategyCore::begin_call(int set) {
  check_callable();
  registry_.follow_moves(/*copies_all=*/!sets_.at(static_cast<size_t>(set))->window_open());
  for (size_t s = 0; s < sets_.size(); ++s) sets_[s]->set_ignored(static_cast<int>(s) != set);
  return *sets_.at(static_cast<size_t>(set));
}

Loss StrategyCore::call_in_precision(const StepCall& call, int local_replica) const {
  const auto device = topology_.devices[static_cast<size_t>(local_replica)].type();
  if (options_.precision == Precision::fp32) {
    const UncachedCasts uncached;
    return call.call(local_replica);
  }
  std::optional<WithoutAutocast> outside;
  if (shares_casts()) outside.emplace(device);
  const Autocast autocast(options_.precision, device);
  return call.call(local_replica);
}

// One replica's share of a micro-batch. Whatever happens to the user's code, the replica takes part in every collective
// that its peers expect.
void StrategyCore::run_replica(ParameterSet& set, const StepCall& call, uint64_t t, bool closing, int local_replica,
                               ReplicaRun& outcome) {
  const auto r = static_cast<size_t>(local_replica);
  const bool empty = !call.call || call.rows[r] == 0;
  const auto context = make_context(local_replica, t);
  // A graph's replays have times of their own.
  if (balancer_ && !is_capturing(topology_.devices[r])) {
    context->timer = std::make_shared<PartTimer>(topology_.devices[r]);
    outcome.timer = context->timer;
  }
  const ReplicaScope scope(context);
  auto& step_group = *groups_.step[r];
  used_step_group_[r] = 0;
  try {
    set.open_window(local_replica, call.usual_rows > 0 ? call.usual_rows : static_cast<double>(call.rows[r]));
    if (call.call) step_group.begin_scope(t);
  } catch (...) {
    give_up(local_replica, outcome);
    return;
  }
  try {
    if (!empty) {
      std::optional<KeptCasts> kept;
      if (shares_casts()) kept.emplace();
      if (context->timer) context->timer->start();
      Loss loss = call_in_precision(call, local_replica);
      if (call.rows[r] < 0 && !loss.weight && loss.reduction == Reduction::mean &&
          (topology_.num_replicas > 1 || options_.accumulate > 1)) {
        throw InvalidArgument(
            "the number of samples in this part is unknown (its tensors' size(0) differ, or it has "
            "none), so its mean loss cannot be averaged; return Loss(value, weight=...)");
      }
      // Two groups of a device may deadlock where their operations overlap.
      const bool overlaps = groups_.control.empty() || used_step_group_[r] == 0;
      set.backward(local_replica, loss, call.rows[r] < 0 ? 1.0 : static_cast<double>(call.rows[r]), overlaps);
      if (context->timer) context->timer->stop();
      outcome.output = std::move(loss.output);
    }
  } catch (...) {
    outcome.error = failures_.cause_of(failures_.capture(std::current_exception()), *context);
  }
  try {
    // Before the buckets leave: a transport that both share must see the step's collectives first.
    if (call.call) {
      const auto failure = outcome.error ? failures_.describe(outcome.error) : Failure{};
      step_group.end_scope(outcome.error ? comm::ScopeEnd::failed
                           : empty       ? comm::ScopeEnd::absent
                                         : comm::ScopeEnd::finished,
                           failure.type + ": " + failure.text);
    }
    auto left = set.end_micro_batch(local_replica, outcome.error != nullptr);
    // The engine's error is the cause, autograd's its consequence (after backward() inside the step function, say):
    // report the cause.
    if (left) outcome.error = std::move(left);
    if (closing) {
      if (failures_.is(outcome.error, Failure::Kind::transport)) std::rethrow_exception(outcome.error);
      const bool reports = failures_.is(outcome.error, Failure::Kind::own);
      set.close_window(local_replica, reports ? failures_.describe(outcome.error) : Failure{},
                       stop_requested_ || SigtermWatch::received());
    }
  } catch (...) {
    give_up(local_replica, outcome);
  }
}

// In a handler: communication broke. Ends the groups that peers would wait in.
void StrategyCore::give_up(int local_replica, ReplicaRun& outcome) {
  const auto r = static_cast<size_t>(local_replica);
  outcome.transport = std::current_exception();
  const bool has_control = !groups_.control.empty();
  // Peers hear of the failure only through the control group, and enqueued device operations would never end: abort
  // both groups.
  if (!has_control && peers_know(outcome.transport)) return;
  const auto failure = failures_.describe(outcome.transport);
  const auto reason = "replica " + std::to_string(topology_.first_replica + local_replica) +
                      " failed outside its step function with " + failure.type + ": " + failure.text;
  groups_.gradients[r]->abort(reason);
  if (has_control) groups_.control[r]->abort(reason);
}

// A rank that is gone never leaves a step, and the group waits for all of its ranks in time.
void StrategyCore::leave_step_group(ParameterSet& set) {
  if (set.servers() == nullptr || !set.servers()->has_lost() || has_left_step_group_) return;
  has_left_step_group_ = true;
  groups_.step = {comm::make_refusing(
      topology_.rank, topology_.num_workers,
      "a worker of this job is gone, and collectives inside a step are between all that met at its start; leave them "
      "out, or start all workers again")};
}

// The casts of a call are kept to its end, where several replicas share torch's cache of them.
bool StrategyCore::shares_casts() const {
  return topology_.local_replicas() > 1 && options_.precision != Precision::fp32;
}

// On the calling thread, when no replica runs: forgets the casts of parameters for a call, and those that it made.
class StrategyCore::CallCasts {
 public:
  explicit CallCasts(StrategyCore& core) : core_(core) {
    const bool was_casting = at::autocast::is_autocast_enabled(core_.topology_.devices.front().type());
    if (core_.shares_casts() && (was_casting || core_.has_casts_)) Autocast::clear_cache();
    core_.has_casts_ = core_.shares_casts();
  }
  ~CallCasts() {
    if (!core_.has_casts_ || core_.busy()) return;
    Autocast::clear_cache();
    core_.has_casts_ = false;
  }
  CallCasts(const CallCasts&) = delete;
  CallCasts& operator=(const CallCasts&) = delete;

 private:
  StrategyCore& core_;
};

StepResult StrategyCore::step(const StepCall& call) {
  const auto pass = enter_alone("step");
  const OnDevice on_device(topology_.devices.front());
  auto& set = begin_call(call.set);
  if (steps_ > 0 && call.call) SigtermWatch::note_step();
  has_tail_ = false;
  try {
    return step_set(set, call);
  } catch (...) {
    fail_step(/*in_apply=*/false);
  }
}

StepResult StrategyCore::step_set(ParameterSet& set, const StepCall& call) {
  leave_step_group(set);
  const bool full = set.micro_batches() + 1 >= options_.accumulate;
  const bool dropping = call.loader_ended && !full && options_.drop_incomplete;
  const bool closing = full || (call.loader_ended && !dropping);
  const bool compares = closing && topology_.num_workers > 1 && !groups_.servers;
  const bool awaits = compares && call.steps_flat() && (divides_steps_ || options_.shard_optimizer);
  awaited_ = awaits ? call.optimizers.size() : 0;
  gradients_are_applied_ = false;
  const uint64_t t = streams_.begin_call();
  if (call.call) rows_ = call.rows;
  set.open_micro_batch(closing, call.steps_flat());
  if (compares) set.agree_on(call.optimizers);
  if (set.servers() != nullptr) set.servers()->note_batches(call.batches);
  if (closing && set.server_window() != nullptr && set.server_window()->joining().is_asked()) {
    JoinReport report;
    report.steps = static_cast<uint64_t>(steps_);
    report.calls = t;
    if (describe_passes_) report.passes = describe_passes_();
    set.server_window()->joining().prepare_report(std::move(report));
  }

  const CallCasts casts(*this);
  if (outsiders_known_ != registry_.num_parameters()) find_outsiders();
  UntouchedGradients untouched(registry_, topology_.devices.size(), outsiders_);
  std::exception_ptr interrupt;
  const auto poll = [&] {
    try {
      if (call.poll) call.poll();
    } catch (...) {
      interrupt = std::current_exception();
      throw;
    }
  };

  // Shared, so that tasks left behind by an interrupt stay valid.
  auto outcomes = std::make_shared<std::vector<ReplicaRun>>(topology_.devices.size());
  auto shared_call = std::make_shared<const StepCall>(call);
  const auto streams = current_streams(topology_.devices);
  try {
    pool_->run(
        [this, &set, shared_call, t, closing, outcomes, streams](int local_replica) {
          const StreamScope scope(streams[static_cast<size_t>(local_replica)]);
          run_replica(set, *shared_call, t, closing, local_replica, (*outcomes)[static_cast<size_t>(local_replica)]);
        },
        poll, call.interrupt);
  } catch (...) {
    if (!interrupt || busy()) {
      untouched.abandon();
      set.abandon_window();
      throw;
    }
  }

  const bool failed = std::any_of(outcomes->begin(), outcomes->end(),
                                  [](const ReplicaRun& outcome) { return outcome.error || outcome.transport; });
  if (failed) {
    WindowSums sums;
    const bool agreed = closing && std::none_of(outcomes->begin(), outcomes->end(),
                                                [](const ReplicaRun& outcome) { return outcome.transport != nullptr; });
    if (agreed) {
      has_tail_ = true;
      sums = set.finish_window(call.steps_flat());
      if (sums.stop_requested) stopping_ = true;
    } else if (closing || dropping) {
      set.drop_window();
    } else {
      for (size_t r = 0; r < outcomes->size(); ++r) {
        const auto& error = (*outcomes)[r].error;
        if (failures_.is(error, Failure::Kind::own)) set.poison(static_cast<int>(r), failures_.describe(error));
        if (failures_.is(error, Failure::Kind::remote)) set.told().raised = true;
      }
    }
    if (interrupt) std::rethrow_exception(interrupt);
    failures_.raise(*outcomes, sums.failures, topology_.rank);
  }
  if (balancer_ && call.call) note_times(call, *outcomes);
  StepResult result = closing ? end_window(set, call) : open_result(set);
  if (dropping) set.drop_window();
  gradients_are_applied_ = true;
  if (interrupt) std::rethrow_exception(interrupt);
  std::vector<c10::IValue> outputs;
  for (auto& outcome : *outcomes) outputs.push_back(std::move(outcome.output));
  result.output = PerReplica<c10::IValue>(std::move(outputs));
  return result;
}

// A call without user function or data that closes the set's open window.
StepCall StrategyCore::empty_call(const StepCall& update) const {
  auto call = update;
  call.call = nullptr;
  call.loader_ended = true;
  call.rows.assign(topology_.devices.size(), 0);
  return call;
}

std::string StrategyCore::watch(const StepCall& update) {
  auto& set = *sets_.at(static_cast<size_t>(update.set));
  const auto call = empty_call(update);
  std::string passes;
  if (set.server_window() == nullptr) return {};
  auto& joining = set.server_window()->joining();
  while (joining.watches()) {
    StepResult result;
    try {
      result = step(call);
    } catch (const RemoteError&) {
      continue;  // dropped on all ranks, which go on
    }
    auto report = joining.learn(result.stepped);
    if (!report) continue;
    steps_ = static_cast<int64_t>(report->steps) + 1;
    streams_.follow(report->calls);
    passes = std::move(report->passes);
  }
  return passes;
}

void StrategyCore::note_times(const StepCall& call, const std::vector<ReplicaRun>& outcomes) {
  std::vector<std::shared_ptr<const PartTimer>> timers;
  for (const auto& outcome : outcomes) timers.push_back(outcome.timer);
  if (std::find(timers.begin(), timers.end(), nullptr) == timers.end()) {
    balancer_->note_when_known(call.rows, std::move(timers));
  }
}

std::vector<int> StrategyCore::open_sets() {
  const auto pass = enter();
  std::vector<int> open;
  for (size_t s = 0; s < sets_.size(); ++s) {
    if (sets_[s]->window_open()) open.push_back(static_cast<int>(s));
  }
  return open;
}

std::optional<StepResult> StrategyCore::flush(const std::vector<StepCall>& updates, bool drop_incomplete) {
  const auto pass = enter_alone("flush");
  check_callable();
  std::optional<StepResult> result;
  for (size_t s = 0; s < sets_.size(); ++s) {
    if (!sets_[s]->window_open()) continue;
    if (drop_incomplete) {
      sets_[s]->drop_window();
      continue;
    }
    StepCall update;
    update.set = static_cast<int>(s);
    for (const auto& given : updates) {
      if (given.set == update.set) update = given;
    }
    auto closed = step(empty_call(update));
    // Whoever called step was told then.
    if (!sets_[s]->told().failed) result = std::move(closed);
  }
  return result;
}

void StrategyCore::run(const StepCall& call) {
  const auto pass = enter_alone("run");
  check_callable();
  const OnDevice on_device(topology_.devices.front());
  registry_.follow_moves(/*copies_all=*/false);
  for (const auto& set : sets_) {
    if (set->servers() != nullptr && !set->window_open()) set->servers()->refresh();
  }
  const uint64_t t = streams_.begin_call();
  rows_ = call.rows;
  const CallCasts casts(*this);
  auto outcomes = std::make_shared<std::vector<ReplicaRun>>(topology_.devices.size());
  auto shared_call = std::make_shared<const StepCall>(call);
  const auto streams = current_streams(topology_.devices);
  pool_->run(
      [this, shared_call, t, outcomes, streams](int local_replica) {
        const auto r = static_cast<size_t>(local_replica);
        const StreamScope stream_scope(streams[r]);
        auto& outcome = (*outcomes)[r];
        const auto context = make_context(local_replica, t);
        const ReplicaScope scope(context);
        const at::NoGradGuard no_grad;
        const bool empty = shared_call->rows[r] == 0;
        try {
          groups_.step[r]->begin_scope(t);
          std::optional<KeptCasts> kept;
          if (shares_casts()) kept.emplace();
          if (!empty) outcome.output = call_in_precision(*shared_call, local_replica).output;
        } catch (...) {
          outcome.error = failures_.cause_of(std::current_exception(), *context);
        }
        const auto failure = outcome.error ? failures_.describe(outcome.error) : Failure{};
        try {
          groups_.step[r]->end_scope(outcome.error ? comm::ScopeEnd::failed
                                     : empty       ? comm::ScopeEnd::absent
                                                   : comm::ScopeEnd::finished,
                                     failure.type + ": " + failure.text);
        } catch (...) {
          outcome.transport = std::current_exception();
        }
      },
      call.poll, call.interrupt);
  failures_.raise(*outcomes, {}, topology_.rank);
}

StepResult StrategyCore::open_result(ParameterSet& set) const {
  const auto sums = set.window().so_far();
  auto result = result_of(sums, sums.on_device ? 0 : set.window().loss_scale().get().scale);
  result.step = steps_;
  return result;
}

StepResult StrategyCore::end_window(ParameterSet& set, const StepCall& call) {
  has_tail_ = true;
  const auto sums = [&] {
    const IntraOpThreads threads(pool_->threads_per_replica());
    return set.finish_window(call.steps_flat());
  }();
  if (sums.stop_requested) stopping_ = true;
  const bool reported_here = std::all_of(sums.failures.begin(), sums.failures.end(),
                                         [&](const auto& failed) { return failed.rank == topology_.rank; });
  if (!reported_here && !set.told().raised) failures_.raise({}, sums.failures, topology_.rank);
  auto result = result_of(sums, sums.on_device ? 0 : set.window().loss_scale().get().scale);
  result.step = steps_;
  if (sums.dropped || !sums.failures.empty()) {
    result.loss = host_scalar(std::numeric_limits<double>::quiet_NaN());
    return result;
  }
  result.stepped = true;
  result.step = ++steps_;
  result.grad_norm = sums.on_device ? sums.report.grad_norm() : host_scalar(sums.grad_norm);
  if (sums.finite) {
    update(set, call);
    if (const auto* edited = set.told().edited) result.grad_norm = host_scalar(edited->norm);
  }
  if (sums.on_device && is_capturing(topology_.devices.front())) return result;
  skip_limit_.note(sums, steps_);
  set.locate_non_finite(skip_limit_.searches());
  skip_limit_.check();
  return result;
}

}  // namespace muster
