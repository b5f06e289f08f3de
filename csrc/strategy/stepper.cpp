#include "strategy/stepper.h"

#include <ATen/ops/scalar_tensor.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <limits>
#include <memory>

#include "core/intra_op_threads.h"
#include "device/kernel_status.h"
#include "job/call_watch.h"
#include "muster/error.h"
#include "strategy/untouched_gradients.h"

namespace muster {

namespace {

at::Tensor host_scalar(double value) { return at::scalar_tensor(value, at::kDouble); }

// The tensors of `sums`, and the loss scale of the set.
StepResult result_of(const WindowSums& sums, ParameterSet& set) {
  if (sums.on_device) return *sums.on_device;
  StepResult result;
  result.loss = host_scalar(sums.loss);
  result.weight = host_scalar(sums.weight);
  result.skipped = at::scalar_tensor(!sums.finite, at::kBool);
  result.loss_scale = set.window().loss_scale().tensor();
  for (const auto& [name, value] : sums.metrics) result.metrics[name] = host_scalar(value);
  return result;
}

}  // namespace

Stepper::Stepper(Session& session, ParameterSets& sets)
    : session_(session),
      sets_(sets),
      replicas_(session),
      errors_(session, sets),
      updates_(session, sets, errors_),
      skip_limit_(session.options().max_skipped, session.topology().devices.front()) {}

StepResult Stepper::step(const StepCall& call) {
  const auto pass = session_.enter_alone("step");
  const OnDevice on_device(session_.topology().devices.front());
  session_.check_callable();
  auto& set = sets_.begin_step(call.set);
  if (steps_ > 0 && call.call) SigtermWatch::note_step();
  has_tail_ = false;
  try {
    return step_set(set, call);
  } catch (...) {
    errors_.rethrow({steps_ + 1, has_tail_});
  }
}

StepResult Stepper::step_set(ParameterSet& set, const StepCall& call) {
  if (set.servers() != nullptr && set.servers()->has_lost()) replicas_.refuse_collectives();
  const auto& options = session_.options();
  const bool full = set.micro_batches() + 1 >= options.accumulate;
  const bool dropping = call.loader_ended && !full && options.drop_incomplete;
  const bool closing = full || (call.loader_ended && !dropping);
  const bool has_others = session_.topology().num_workers > 1 && !session_.groups().servers;
  const bool compares = closing && has_others;
  const bool awaits = compares && call.steps_flat() && (session_.divides_steps() || options.shard_optimizer);
  updates_.expect(awaits ? call.optimizers.size() : 0);
  gradients_are_applied_ = false;
  const uint64_t number = session_.streams().begin_call();
  if (call.call) replicas_.set_rows(call.rows);
  const auto outsiders = has_others && !set.window_open() ? sets_.outsiders_to_compare() : std::vector<size_t>();
  const auto& calls = session_.groups().calls;
  if (calls && closing) calls->note_window();  // before the collectives of a set's first step
  auto giving_up = c10::make_scope_exit([&] {
    if (calls) calls->give_up();
  });
  set.open_micro_batch(closing, call.steps_flat(), call.optimizers, outsiders, call.call != nullptr);
  if (compares) set.agree_on(call.optimizers);
  if (set.servers() != nullptr) set.servers()->note_batches(call.batches);
  if (closing) prepare_report(set, number);

  const ReplicaCalls::Casts casts(replicas_);
  const auto& devices = session_.topology().devices;
  UntouchedGradients untouched(session_.registry(), devices.size(), sets_.outsiders());
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
  auto outcomes = std::make_shared<std::vector<ReplicaRun>>(devices.size());
  const auto writes = std::make_shared<const StepWrites>(session_.registry(), devices, has_others);
  const MicroBatch batch{set, std::make_shared<const StepCall>(call), number, closing, writes, stop_requested_};
  const auto streams = current_streams(devices);
  try {
    session_.pool().run(
        [this, batch, outcomes, streams](int local_replica) {
          const auto r = static_cast<size_t>(local_replica);
          const StreamScope scope(streams[r]);
          replicas_.step(batch, local_replica, (*outcomes)[r]);
        },
        poll, call.interrupt);
  } catch (...) {
    if (!interrupt || session_.busy()) {
      untouched.abandon();
      set.abandon_window();
      throw;
    }
  }

  if (!interrupt) giving_up.release();

  if (const auto& written = outcomes->front().written; !written.empty()) {
    doubt(written);
    auto& of_window = written_[call.set];
    of_window.insert(of_window.end(), written.begin(), written.end());
  }
  const bool failed = std::any_of(outcomes->begin(), outcomes->end(),
                                  [](const ReplicaRun& outcome) { return outcome.error || outcome.transport; });
  if (failed) fail_set(set, call, closing, dropping, *outcomes, interrupt);
  if (session_.balancer() != nullptr && call.call) note_times(call, *outcomes);
  StepResult result = closing ? end_window(set, call) : open_result(set);
  if (dropping) set.drop_window();
  gradients_are_applied_ = true;
  if (interrupt) std::rethrow_exception(interrupt);
  std::vector<c10::IValue> outputs;
  for (auto& outcome : *outcomes) outputs.push_back(std::move(outcome.output));
  result.output = PerReplica<c10::IValue>(std::move(outputs));
  return result;
}

void Stepper::doubt(const std::vector<size_t>& parameters) {
  for (const size_t p : parameters) session_.registry().doubt(p);
}

// For a worker that joins, and asks in this window what the others do.
void Stepper::prepare_report(ParameterSet& set, uint64_t calls) {
  if (set.server_window() == nullptr || !set.server_window()->joining().is_asked()) return;
  JoinReport report;
  report.steps = static_cast<uint64_t>(steps_);
  report.calls = calls;
  if (describe_passes_) report.passes = describe_passes_();
  set.server_window()->joining().prepare_report(std::move(report));
}

// A replica failed: ends its window with the other ranks, where they can still agree, or leaves the failure to the
// window's end. Raises it, or what interrupted the call.
void Stepper::fail_set(ParameterSet& set, const StepCall& call, bool closing, bool dropping,
                       const std::vector<ReplicaRun>& outcomes, const std::exception_ptr& interrupt) {
  const auto& failures = session_.failures();
  WindowSums sums;
  const bool agreed = closing && std::none_of(outcomes.begin(), outcomes.end(),
                                              [](const ReplicaRun& outcome) { return outcome.transport != nullptr; });
  if (agreed) {
    has_tail_ = true;
    sums = set.finish_window(call.steps_flat());
    if (sums.stop_requested) stopping_ = true;
  } else if (closing || dropping) {
    set.drop_window();
  } else {
    for (size_t r = 0; r < outcomes.size(); ++r) {
      const auto& error = outcomes[r].error;
      if (failures.is(error, Failure::Kind::own)) set.poison(static_cast<int>(r), failures.describe(error));
      if (failures.is(error, Failure::Kind::remote)) set.told().raised = true;
    }
  }
  if (interrupt) std::rethrow_exception(interrupt);
  failures.raise(outcomes, sums.failures, session_.topology().rank);
}

void Stepper::note_times(const StepCall& call, const std::vector<ReplicaRun>& outcomes) {
  std::vector<std::shared_ptr<const PartTimer>> timers;
  for (const auto& outcome : outcomes) timers.push_back(outcome.timer);
  if (std::find(timers.begin(), timers.end(), nullptr) == timers.end()) {
    session_.balancer()->note_when_known(call.rows, std::move(timers));
  }
}

StepResult Stepper::open_result(ParameterSet& set) const {
  auto result = result_of(set.window().so_far(), set);
  result.step = steps_;
  return result;
}

StepResult Stepper::end_window(ParameterSet& set, const StepCall& call) {
  has_tail_ = true;
  // The update counts as all that was written in the window, and what steps wrote is compared in the next one.
  const auto end = c10::make_scope_exit([this, &call] {
    if (const auto written = written_.extract(call.set)) doubt(written.mapped());
  });
  auto sums = [&] {
    const IntraOpThreads threads(session_.pool().threads_per_replica());
    return set.finish_window(call.steps_flat());
  }();
  if (sums.stop_requested) stopping_ = true;
  const int rank = session_.topology().rank;
  const bool reported_here =
      std::all_of(sums.failures.begin(), sums.failures.end(), [&](const auto& failed) { return failed.rank == rank; });
  if (!reported_here && !set.told().raised) session_.failures().raise({}, sums.failures, rank);
  auto result = result_of(sums, set);
  result.step = steps_;
  if (sums.dropped || !sums.failures.empty()) {
    result.loss = host_scalar(std::numeric_limits<double>::quiet_NaN());
    return result;
  }
  result.stepped = true;
  result.step = ++steps_;
  result.grad_norm = sums.on_device ? sums.report.grad_norm() : host_scalar(sums.grad_norm);
  if (sums.finite) {
    try {
      updates_.make(set, call, steps_);
    } catch (...) {
      if (updates_.was_dropped()) --steps_;
      throw;
    }
    if (const auto* edited = set.told().edited) {
      result.grad_norm = host_scalar(edited->norm);
      sums.finite = edited->finite != 0;
      result.skipped = at::scalar_tensor(!sums.finite, at::kBool);
    }
  }
  if (sums.on_device && is_capturing(session_.topology().devices.front())) return result;
  skip_limit_.note(sums, steps_);
  set.locate_non_finite(skip_limit_.searches());
  skip_limit_.check();
  return result;
}

void Stepper::go_on_after(int64_t steps, uint64_t calls, uint64_t seed) {
  const auto pass = session_.enter_alone("load");
  session_.check_callable();
  if (!sets_.open().empty()) throw InvalidArgument("a window is open: call flush() before load()");
  steps_ = steps;
  session_.streams().follow(calls);
  session_.streams().take_seed(seed);
  if (auto& servers = session_.groups().servers) {
    servers->facts.seed = seed;  // which they give to joiners
    servers->is_loaded = true;
  }
}

// A call without user function or data that closes the set's open window.
StepCall Stepper::empty_call(const StepCall& update) const {
  auto call = update;
  call.call = nullptr;
  call.loader_ended = true;
  call.rows.assign(session_.topology().devices.size(), 0);
  return call;
}

std::optional<StepResult> Stepper::flush(const std::vector<StepCall>& updates, bool drop_incomplete) {
  const auto pass = session_.enter_alone("flush");
  session_.check_callable();
  std::optional<StepResult> result;
  for (const int number : sets_.open()) {
    auto& set = sets_.at(number);
    if (drop_incomplete) {
      set.drop_window();
      continue;
    }
    StepCall update;
    update.set = number;
    for (const auto& given : updates) {
      if (given.set == number) update = given;
    }
    auto closed = step(empty_call(update));
    // Whoever called step was told then.
    if (!set.told().failed) result = std::move(closed);
  }
  return result;
}

std::string Stepper::watch(const StepCall& update) {
  auto& set = sets_.at(update.set);
  if (set.server_window() == nullptr) return {};
  const auto call = empty_call(update);
  std::string passes;
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
    session_.streams().follow(report->calls);
    passes = std::move(report->passes);
  }
  return passes;
}

void Stepper::run(const StepCall& call) {
  const auto pass = session_.enter_alone("run");
  session_.check_callable();
  const auto& devices = session_.topology().devices;
  const OnDevice on_device(devices.front());
  session_.registry().follow_moves(/*copies_all=*/false);
  sets_.refresh();
  const uint64_t number = session_.streams().begin_call();
  replicas_.set_rows(call.rows);
  const ReplicaCalls::Casts casts(replicas_);
  auto outcomes = std::make_shared<std::vector<ReplicaRun>>(devices.size());
  auto shared_call = std::make_shared<const StepCall>(call);
  const auto writes = std::make_shared<const StepWrites>(session_.registry(), devices, /*are_compared=*/false);
  const auto streams = current_streams(devices);
  session_.pool().run(
      [this, shared_call, writes, number, outcomes, streams](int local_replica) {
        const auto r = static_cast<size_t>(local_replica);
        const StreamScope scope(streams[r]);
        replicas_.run(*shared_call, *writes, number, local_replica, (*outcomes)[r]);
      },
      call.poll, call.interrupt);
  session_.failures().raise(*outcomes, {}, session_.topology().rank);
}

}  // namespace muster
