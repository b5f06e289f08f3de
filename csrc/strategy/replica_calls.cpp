#include "strategy/replica_calls.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "core/log.h"
#include "device/kernel_status.h"
#include "job/make_groups.h"
#include "muster/error.h"
#include "muster/precision.h"
#include "strategy/casts.h"
#include "strategy/sigterm.h"

namespace muster {

ReplicaCalls::ReplicaCalls(Session& session) : session_(session) { rows_.resize(session.topology().devices.size()); }

// Several replicas share torch's cache of casts, which are then kept to the end of the call.
bool ReplicaCalls::shares_casts() const {
  return session_.topology().local_replicas() > 1 && session_.options().precision != Precision::fp32;
}

ReplicaCalls::Casts::Casts(ReplicaCalls& calls) : calls_(calls) {
  const auto device = calls_.session_.topology().devices.front().type();
  const bool was_casting = at::autocast::is_autocast_enabled(device);
  if (calls_.shares_casts() && (was_casting || calls_.has_casts_)) Autocast::clear_cache();
  calls_.has_casts_ = calls_.shares_casts();
}

ReplicaCalls::Casts::~Casts() {
  if (!calls_.has_casts_ || calls_.session_.busy()) return;
  Autocast::clear_cache();
  calls_.has_casts_ = false;
}

std::shared_ptr<ReplicaContext> ReplicaCalls::make_context(int local_replica, uint64_t number) {
  auto context = std::make_shared<ReplicaContext>();
  context->local_replica = local_replica;
  context->replica = session_.topology().first_replica + local_replica;
  context->strategy = &session_;
  session_.streams().give(*context, number);
  return context;
}

Loss ReplicaCalls::call_in_precision(const StepCall& call, int local_replica) const {
  const auto device = session_.topology().devices[static_cast<size_t>(local_replica)].type();
  const auto precision = session_.options().precision;
  if (precision == Precision::fp32) {
    const UncachedCasts uncached;
    return call.call(local_replica);
  }
  std::optional<WithoutAutocast> outside;
  if (shares_casts()) outside.emplace(device);
  const Autocast autocast(precision, device);
  return call.call(local_replica);
}

Loss ReplicaCalls::call_checked(const StepCall& call, int local_replica) {
  const auto r = static_cast<size_t>(local_replica);
  Loss loss = call_in_precision(call, local_replica);
  if (loss.weight && !loss.weight->defined()) loss.weight.reset();
  if (loss.weight && loss.weight->numel() != 1) {
    throw InvalidArgument("the weight of a Loss is a tensor of " + std::to_string(loss.weight->numel()) +
                          " values; give it one: the samples that the loss is a mean over");
  }
  if (loss.weight && loss.weight->requires_grad()) {
    throw InvalidArgument(
        "the weight of a Loss requires a gradient, which a mean over all parts' weights would need and no part can "
        "give; detach() it, or reduce() the sums of losses and of weights in the step and return their quotient");
  }
  const bool is_averaged = !loss.weight && loss.reduction == Reduction::mean &&
                           (session_.topology().num_replicas > 1 || session_.options().accumulate > 1);
  if (!is_averaged) return loss;
  if (!call.samples_left.empty() && call.samples_left[r] < call.rows[r] && !warned_of_samples_.exchange(true)) {
    const auto rows = std::to_string(call.rows[r]);
    const auto left = std::to_string(call.samples_left[r]);
    log(LogLevel::warning, "a part of " + rows + " samples was read as " + left +
                               " rows, and its mean loss counts as that of " + rows +
                               " samples; where the data set left some out, set the Loss's weight to " + left);
  }
  if (call.rows[r] < 0) {
    throw InvalidArgument(
        "the number of samples in this part is unknown (its tensors' size(0) differ, or it has "
        "none), so its mean loss cannot be averaged; return Loss(value, weight=...)");
  }
  return loss;
}

void ReplicaCalls::step(const MicroBatch& batch, int local_replica, ReplicaRun& outcome) {
  const auto r = static_cast<size_t>(local_replica);
  const auto& call = *batch.call;
  const bool empty = !call.call || call.rows[r] == 0;
  const auto context = make_context(local_replica, batch.number);
  // A graph's replays have times of their own.
  const auto device = session_.topology().devices[r];
  if (session_.balancer() != nullptr && !is_capturing(device)) {
    context->timer = std::make_shared<PartTimer>(device);
    outcome.timer = context->timer;
  }
  const ReplicaScope scope(context);
  // The user's function may leave another stream, or device, as the thread's current one.
  const auto begun_on = current_streams({device}).front();
  std::optional<StreamScope> as_begun;
  const auto come_back = [&] {
    if (!begun_on) return;
    order_streams(*current_streams({device}).front(), *begun_on);
    as_begun.emplace(begun_on);
  };
  try {
    auto* const buckets =
        batch.set.open_window(local_replica, call.usual_rows > 0 ? call.usual_rows : static_cast<double>(call.rows[r]));
    const auto& groups = session_.groups();
    if (call.call) groups.step[r]->begin_scope(batch.number, groups.step_shares_order ? buckets : nullptr);
  } catch (...) {
    give_up(local_replica, outcome);
    return;
  }
  try {
    if (!empty) {
      std::optional<KeptCasts> kept;
      if (shares_casts()) kept.emplace();
      if (context->timer) context->timer->start();
      Loss loss;
      try {
        loss = call_checked(call, local_replica);
      } catch (...) {
        come_back();
        throw;
      }
      come_back();
      batch.set.backward(local_replica, loss, call.rows[r] < 0 ? 1.0 : static_cast<double>(call.rows[r]));
      if (context->timer) context->timer->stop();
      batch.writes->check("the step", /*may_stay=*/false);
      // Before the window closes: then other workers of the host may step parameters in this one's memory.
      if (local_replica == 0) outcome.written = batch.writes->written();
      outcome.output = std::move(loss.output);
    }
  } catch (...) {
    const auto& failures = session_.failures();
    outcome.error = failures.cause_of(failures.capture(std::current_exception()), *context);
  }
  try {
    // A transport that both share must see the step's collectives before all buckets, and peers may wait on the host
    // for buckets before they end the scope.
    comm::Work end;
    if (call.call) end = end_scope(local_replica, outcome, empty);
    // The engine's error is the cause, autograd's its consequence (after backward() inside the step function, say):
    // report the cause.
    if (auto left = batch.set.end_micro_batch(local_replica, outcome.error != nullptr)) outcome.error = std::move(left);
    await_end(end, outcome);
    if (batch.closes) close_window(batch, local_replica, outcome);
  } catch (...) {
    give_up(local_replica, outcome);
  }
}

void ReplicaCalls::close_window(const MicroBatch& batch, int local_replica, const ReplicaRun& outcome) {
  const auto& failures = session_.failures();
  if (failures.is(outcome.error, Failure::Kind::transport)) std::rethrow_exception(outcome.error);
  const bool reports = failures.is(outcome.error, Failure::Kind::own);
  batch.set.close_window(local_replica, reports ? failures.describe(outcome.error) : Failure{},
                         batch.stop_requested || SigtermWatch::received());
}

comm::Work ReplicaCalls::end_scope(int local_replica, const ReplicaRun& outcome, bool is_empty) {
  const auto failure = outcome.error ? session_.failures().describe(outcome.error) : Failure{};
  return session_.groups().step[static_cast<size_t>(local_replica)]->end_scope(outcome.error ? comm::ScopeEnd::failed
                                                                               : is_empty    ? comm::ScopeEnd::absent
                                                                                             : comm::ScopeEnd::finished,
                                                                               failure.type + ": " + failure.text);
}

// What peers did since the replica's last collective may be heard of here. Throws where communication broke.
void ReplicaCalls::await_end(comm::Work& end, ReplicaRun& outcome) const {
  try {
    end.wait();
  } catch (...) {
    if (session_.failures().is(std::current_exception(), Failure::Kind::transport)) throw;
    if (!outcome.error) outcome.error = std::current_exception();
  }
}

// In a handler: communication broke. Ends the groups that peers would wait in.
void ReplicaCalls::give_up(int local_replica, ReplicaRun& outcome) {
  const auto r = static_cast<size_t>(local_replica);
  outcome.transport = std::current_exception();
  const auto& groups = session_.groups();
  const bool has_control = !groups.control.empty();
  // Peers hear of the failure only through the control group, and enqueued device operations would never end: abort
  // both groups.
  if (!has_control && peers_know(outcome.transport)) return;
  const auto failure = session_.failures().describe(outcome.transport);
  const auto reason = "replica " + std::to_string(session_.topology().first_replica + local_replica) +
                      " failed outside its step function with " + failure.type + ": " + failure.text;
  groups.gradients[r]->abort(reason);
  if (groups.step_shares_order) groups.step[r]->abort(reason);
  if (has_control) groups.control[r]->abort(reason);
}

void ReplicaCalls::run(const StepCall& call, const StepWrites& writes, uint64_t number, int local_replica,
                       ReplicaRun& outcome) {
  const auto r = static_cast<size_t>(local_replica);
  const auto context = make_context(local_replica, number);
  context->is_in_run = true;
  const ReplicaScope scope(context);
  const at::NoGradGuard no_grad;
  const bool empty = call.rows[r] == 0;
  try {
    session_.groups().step[r]->begin_scope(number);
    std::optional<KeptCasts> kept;
    if (shares_casts()) kept.emplace();
    if (!empty) {
      outcome.output = call_in_precision(call, local_replica).output;
      writes.check("run()", /*may_stay=*/true);
    }
    if (context->stray_gradient) std::rethrow_exception(context->stray_gradient);
  } catch (...) {
    outcome.error = session_.failures().cause_of(std::current_exception(), *context);
  }
  try {
    auto end = end_scope(local_replica, outcome, empty);
    await_end(end, outcome);
  } catch (...) {
    outcome.transport = std::current_exception();
  }
}

int64_t ReplicaCalls::current_rows() const {
  const int replica = session_.current_local_replica();
  return replica < 0 ? -1 : rows_[static_cast<size_t>(replica)];
}

comm::Communicator& ReplicaCalls::step_group(const std::vector<at::Tensor>& values) {
  const int replica = session_.current_local_replica();
  if (replica < 0) throw InvalidArgument("no step of this strategy is running on this thread");
  const auto& devices = session_.topology().devices;
  const auto device = devices[static_cast<size_t>(replica)];
  const bool needs_backward =
      at::GradMode::is_enabled() &&
      std::any_of(values.begin(), values.end(), [](const at::Tensor& value) { return value.requires_grad(); });
  if (needs_backward && !device.is_cpu() && std::count(devices.begin(), devices.end(), device) > 1) {
    throw InvalidArgument(
        "several replicas share " + device.str() +
        ", whose gradients torch computes on one thread: collectives inside the step (and SyncBatchNorm) cannot be "
        "differentiated there; detach() the value, or use one replica a GPU");
  }
  return *session_.groups().step[static_cast<size_t>(replica)];
}

void ReplicaCalls::refuse_collectives() {
  if (std::exchange(refuses_collectives_, true)) return;
  session_.groups().step = refusing_replicas(
      session_.topology(),
      "a worker of this job is gone, and collectives inside a step are between all that met at its start; leave them "
      "out, or start all workers again");
}

}  // namespace muster
