#include "strategy/strategy_core.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <typeinfo>

#include "comm/kernel_status.h"
#include "muster/error.h"
#include "muster/precision.h"

namespace muster {

namespace {

// Peers find out by themselves about a lost or late peer and a mismatch.
bool peers_know(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const CommError&) {
    return true;
  } catch (const LayoutMismatch&) {
    return true;
  } catch (...) {
    return false;
  }
}

// Backward writes `.grad` of parameters that take no part, too: they get back what they had.
class UntouchedGradients {
 public:
  UntouchedGradients(const ParameterRegistry& registry, size_t replicas, const std::vector<size_t>& parameters) {
    for (size_t p : parameters) {
      for (size_t r = 0; r < replicas; ++r) {
        const auto& parameter = registry.parameter(r, p);
        kept_.emplace_back(parameter, std::exchange(parameter.mutable_grad(), at::Tensor()));
      }
    }
  }
  ~UntouchedGradients() {
    for (auto& [parameter, gradient] : kept_) parameter.mutable_grad() = std::move(gradient);
  }
  UntouchedGradients(const UntouchedGradients&) = delete;
  UntouchedGradients& operator=(const UntouchedGradients&) = delete;

  /// Gives nothing back: backward may still be running.
  void abandon() noexcept { kept_.clear(); }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;
};

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

Failure describe_cpp_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const RemoteError& e) {
    return {"muster::RemoteError", e.what(), Failure::Kind::remote};
  } catch (const CommError& e) {
    return {c10::demangle(typeid(e).name()), e.what(), Failure::Kind::transport};
  } catch (const std::exception& e) {
    return {c10::demangle(typeid(e).name()), e.what()};
  } catch (...) {
    return {"unknown exception", ""};
  }
}

struct StrategyCore::ReplicaRun {
  std::exception_ptr error;      // the step's own
  std::exception_ptr transport;  // communication broke: nothing can be agreed any more
  c10::IValue output;
  std::shared_ptr<const PartTimer> timer;
};

StrategyCore::StrategyCore(Topology topology, Groups groups, StrategyOptions options, std::shared_ptr<ReplicaPool> pool,
                           uint64_t seed)
    : topology_(std::move(topology)),
      groups_(std::move(groups)),
      options_(options),
      pool_(std::move(pool)),
      seed_(seed),
      registry_(topology_.devices),
      describe_(describe_cpp_error),
      capture_([](std::exception_ptr error) { return error; }) {
  divides_steps_ = options_.fuse && !options_.shard_optimizer && topology_.num_replicas > 1 &&
                   !is_streamed(topology_.devices.front()) && groups_.gradients.front()->peer_memory() != nullptr;
  rows_.resize(topology_.devices.size());
  used_step_group_.resize(topology_.devices.size());
  for (const auto& device : topology_.devices) {
    generators_.push_back(at::detail::createCPUGenerator(0));
    device_generators_.push_back(device.is_cpu() ? at::Generator() : new_generator(device));
  }
}

StrategyCore::~StrategyCore() { close(); }

void StrategyCore::balance_parts() {
  if (topology_.local_replicas() > 1) balancer_ = std::make_unique<Balancer>(topology_.local_replicas());
}

void StrategyCore::close() {
  if (closed_) return;
  closed_ = true;
  pool_->stop();
  sets_.clear();
  groups_.gradients.clear();
  groups_.step.clear();
  groups_.control.clear();
  groups_.workers.reset();
}

void StrategyCore::check_open() const {
  if (closed_) throw InvalidArgument("the strategy is closed; make a new one");
}

comm::Communicator& StrategyCore::workers() {
  check_open();
  return *groups_.workers;
}

void StrategyCore::check_callable() const {
  check_open();
  if (current_replica()) throw InvalidArgument("step(), run() and flush() cannot be called inside a step");
  if (busy()) throw CommError("a step that was interrupted is still running in a replica; wait for it, or exit");
}

void StrategyCore::find_outsiders() {
  outsiders_known_ = registry_.num_parameters();
  outsiders_.clear();
  std::vector<bool> inside(outsiders_known_, false);
  for (const auto& set : sets_) {
    for (int p : set->parameters()) inside[static_cast<size_t>(p)] = true;
  }
  for (size_t p = 0; p < outsiders_known_; ++p) {
    if (!inside[p]) outsiders_.push_back(p);
  }
}

int StrategyCore::add_module(ModuleTensors module) {
  check_open();
  const bool is_first = registry_.num_parameters() == 0;
  const int number = registry_.add(std::move(module), *groups_.workers);
  if (is_first) choose_buckets();
  return number;
}

// On a device the first reductions set up connections and their time says little.
void StrategyCore::choose_buckets() {
  if (options_.bucket_bytes) {
    groups_.buckets = buckets_of(*options_.bucket_bytes);
    return;
  }
  if (topology_.num_replicas == 1 || is_streamed(topology_.devices.front())) return;
  std::vector<LinkSpeed> links(topology_.devices.size());
  pool_->run([&](int local_replica) {
    const auto r = static_cast<size_t>(local_replica);
    links[r] = measure_link(*groups_.gradients[r]);
  });
  groups_.link = links.front();
  groups_.buckets = muster::choose_buckets(links.front());
}

int StrategyCore::set_of(std::vector<int> parameters) {
  std::sort(parameters.begin(), parameters.end());
  parameters.erase(std::unique(parameters.begin(), parameters.end()), parameters.end());
  for (size_t s = 0; s < sets_.size(); ++s) {
    const auto& others = sets_[s]->parameters();
    if (others == parameters) return static_cast<int>(s);
    std::vector<int> shared;
    std::set_intersection(others.begin(), others.end(), parameters.begin(), parameters.end(),
                          std::back_inserter(shared));
    if (!shared.empty()) {
      throw InvalidArgument(
          "parameter '" + registry_.name(static_cast<size_t>(shared.front())) +
          "' is in two different sets of optimizers=; sets must be equal or disjoint: pass optimizers= "
          "in every step, with the same groups");
    }
  }
  sets_.push_back(std::make_unique<GradientSet>(registry_, topology_, groups_, options_, this, std::move(parameters)));
  outsiders_known_ = 0;
  return static_cast<int>(sets_.size()) - 1;
}

void StrategyCore::change_set(int set, std::vector<int> parameters) {
  std::sort(parameters.begin(), parameters.end());
  sets_.at(static_cast<size_t>(set))->set_parameters(std::move(parameters));
  outsiders_known_ = 0;
}

std::shared_ptr<ReplicaContext> StrategyCore::make_context(int local_replica, uint64_t t) {
  auto context = std::make_shared<ReplicaContext>();
  context->local_replica = local_replica;
  context->replica = topology_.first_replica + local_replica;
  context->strategy = this;
  auto& generator = generators_[static_cast<size_t>(local_replica)];
  generator.set_current_seed(stream_seed(seed_, static_cast<uint64_t>(context->replica), t));
  context->generator = generator;
  auto& on_device = device_generators_[static_cast<size_t>(local_replica)];
  // A graph replays its own draws: torch.cuda.graph knows the ambient generator.
  if (on_device.defined() && !is_capturing(on_device.device())) {
    on_device.set_current_seed(generator.current_seed());
    context->device_generator = on_device;
  }
  return context;
}

int StrategyCore::current_local_replica() const {
  const auto context = current_replica();
  return context && context->strategy == this ? context->local_replica : -1;
}

int64_t StrategyCore::current_rows() const {
  const int replica = current_local_replica();
  return replica < 0 ? -1 : rows_[static_cast<size_t>(replica)];
}

comm::Communicator& StrategyCore::step_group(const std::vector<at::Tensor>& values) {
  const int replica = current_local_replica();
  if (replica < 0) throw InvalidArgument("no step of this strategy is running on this thread");
  const auto device = topology_.devices[static_cast<size_t>(replica)];
  const bool needs_backward =
      at::GradMode::is_enabled() &&
      std::any_of(values.begin(), values.end(), [](const at::Tensor& value) { return value.requires_grad(); });
  if (needs_backward && !device.is_cpu() &&
      std::count(topology_.devices.begin(), topology_.devices.end(), device) > 1) {
    throw InvalidArgument(
        "several replicas share " + device.str() +
        ", whose gradients torch computes on one thread: collectives inside the step (and SyncBatchNorm) cannot be "
        "differentiated there; detach() the value, or use one replica a GPU");
  }
  used_step_group_[static_cast<size_t>(replica)] = 1;
  return *groups_.step[static_cast<size_t>(replica)];
}

GradientSet& StrategyCore::begin_call(int set) {
  check_callable();
  registry_.follow_moves(/*copies_all=*/!sets_.at(static_cast<size_t>(set))->window_open());
  for (size_t s = 0; s < sets_.size(); ++s) sets_[s]->set_ignored(static_cast<int>(s) != set);
  return *sets_.at(static_cast<size_t>(set));
}

Loss StrategyCore::call_in_precision(const StepCall& call, int local_replica) const {
  std::optional<Autocast> autocast;
  if (options_.precision != Precision::fp32) {
    autocast.emplace(options_.precision, topology_.devices[static_cast<size_t>(local_replica)].type());
  }
  return call.call(local_replica);
}

// One replica's share of a micro-batch. Whatever happens to the user's code, the replica takes part in every collective
// that its peers expect.
void StrategyCore::run_replica(GradientSet& set, const StepCall& call, uint64_t t, bool closing, int local_replica,
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
    set.open_window(local_replica, call.rows[r]);
    if (call.call) step_group.begin_scope(t);
  } catch (...) {
    give_up(local_replica, outcome);
    return;
  }
  try {
    if (!empty) {
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
    outcome.error = capture_(std::current_exception());
  }
  try {
    // Before the buckets leave: a transport that both share must see the step's collectives first.
    if (call.call) {
      const auto failure = outcome.error ? describe_(outcome.error) : Failure{};
      step_group.end_scope(outcome.error ? comm::ScopeEnd::failed
                           : empty       ? comm::ScopeEnd::absent
                                         : comm::ScopeEnd::finished,
                           failure.type + ": " + failure.text);
    }
    auto left = set.end_micro_batch(local_replica, outcome.error != nullptr);
    // What the engine found (a backward() by hand, say) explains what autograd complained about.
    if (left) outcome.error = std::move(left);
    if (closing) {
      if (is(outcome.error, Failure::Kind::transport)) std::rethrow_exception(outcome.error);
      const bool reports = is(outcome.error, Failure::Kind::own);
      set.close_window(local_replica, reports ? describe_(outcome.error) : Failure{},
                       stop_requested_ || sigterm_received());
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
  // Of a device's group peers learn through the control group alone, and what is under way there waits for ever.
  if (!has_control && peers_know(outcome.transport)) return;
  const auto failure = describe_(outcome.transport);
  const auto reason = "replica " + std::to_string(topology_.first_replica + local_replica) +
                      " failed outside its step function with " + failure.type + ": " + failure.text;
  groups_.gradients[r]->abort(reason);
  if (has_control) groups_.control[r]->abort(reason);
}

void StrategyCore::raise_failures(const std::vector<ReplicaRun>& outcomes, const WindowSums* sums) const {
  for (const auto& outcome : outcomes) {
    if (outcome.error && !is(outcome.error, Failure::Kind::remote)) std::rethrow_exception(outcome.error);
  }
  for (const auto& outcome : outcomes) {
    if (outcome.transport) std::rethrow_exception(outcome.transport);
  }
  if (sums != nullptr && !sums->failures.empty()) {
    const auto other = std::find_if(sums->failures.begin(), sums->failures.end(),
                                    [&](const auto& failed) { return failed.rank != topology_.rank; });
    const auto& [rank, replica, failure] = other != sums->failures.end() ? *other : sums->failures.front();
    throw RemoteError(rank, replica, failure.type, failure.text,
                      "the step of replica " + std::to_string(replica) + " on rank " + std::to_string(rank) +
                          " raised " + failure.type + ": " + failure.text +
                          "; the window was dropped on all ranks and training can go on");
  }
  for (const auto& outcome : outcomes) {
    if (outcome.error) std::rethrow_exception(outcome.error);
  }
}

StepResult StrategyCore::step(const StepCall& call) {
  const OnDevice on_device(topology_.devices.front());
  auto& set = begin_call(call.set);
  const uint64_t t = ++calls_;
  if (call.call) rows_ = call.rows;
  const bool full = set.micro_batches() + 1 >= options_.accumulate;
  const bool dropping = call.loader_ended && !full && options_.drop_incomplete;
  const bool closing = full || (call.loader_ended && !dropping);
  set.open_micro_batch(closing, call.fused);

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
      sums = set.finish_window(call.fused);
      if (sums.stop_requested) stopping_ = true;
    } else if (closing || dropping) {
      set.drop_window();
    } else {
      for (size_t r = 0; r < outcomes->size(); ++r) {
        const auto& error = (*outcomes)[r].error;
        if (is(error, Failure::Kind::own)) set.poison(static_cast<int>(r), describe_(error));
        if (is(error, Failure::Kind::remote)) set.note_told();
      }
    }
    if (interrupt) std::rethrow_exception(interrupt);
    raise_failures(*outcomes, agreed ? &sums : nullptr);
  }
  if (balancer_ && call.call) note_times(call, *outcomes);
  StepResult result = closing ? end_window(set, call) : open_result(set);
  if (dropping) set.drop_window();
  if (interrupt) std::rethrow_exception(interrupt);
  std::vector<c10::IValue> outputs;
  for (auto& outcome : *outcomes) outputs.push_back(std::move(outcome.output));
  result.output = PerReplica<c10::IValue>(std::move(outputs));
  return result;
}

void StrategyCore::note_times(const StepCall& call, const std::vector<ReplicaRun>& outcomes) {
  std::vector<std::shared_ptr<const PartTimer>> timers;
  for (const auto& outcome : outcomes) timers.push_back(outcome.timer);
  if (std::find(timers.begin(), timers.end(), nullptr) == timers.end()) {
    balancer_->note_when_known(call.rows, std::move(timers));
  }
}

std::optional<StepResult> StrategyCore::flush(const std::function<void(int set)>& apply,
                                              const std::function<bool(int set)>& fused, bool drop_incomplete) {
  check_callable();
  std::optional<StepResult> result;
  for (size_t s = 0; s < sets_.size(); ++s) {
    if (!sets_[s]->window_open()) continue;
    if (drop_incomplete) {
      sets_[s]->drop_window();
      continue;
    }
    StepCall call;
    call.set = static_cast<int>(s);
    call.loader_ended = true;
    call.rows.assign(topology_.devices.size(), 0);
    call.apply = [&apply, s] { apply(static_cast<int>(s)); };
    call.fused = fused(static_cast<int>(s));
    result = step(call);
  }
  return result;
}

void StrategyCore::run(const StepCall& call) {
  check_callable();
  const OnDevice on_device(topology_.devices.front());
  registry_.follow_moves(/*copies_all=*/false);
  const uint64_t t = ++calls_;
  rows_ = call.rows;
  auto outcomes = std::make_shared<std::vector<ReplicaRun>>(topology_.devices.size());
  auto shared_call = std::make_shared<const StepCall>(call);
  const auto streams = current_streams(topology_.devices);
  pool_->run(
      [this, shared_call, t, outcomes, streams](int local_replica) {
        const auto r = static_cast<size_t>(local_replica);
        const StreamScope stream_scope(streams[r]);
        auto& outcome = (*outcomes)[r];
        const ReplicaScope scope(make_context(local_replica, t));
        const at::NoGradGuard no_grad;
        const bool empty = shared_call->rows[r] == 0;
        try {
          groups_.step[r]->begin_scope(t);
          if (!empty) outcome.output = call_in_precision(*shared_call, local_replica).output;
        } catch (...) {
          outcome.error = std::current_exception();
        }
        const auto failure = outcome.error ? describe_(outcome.error) : Failure{};
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
  raise_failures(*outcomes, nullptr);
}

StepResult StrategyCore::open_result(const GradientSet& set) const {
  const auto sums = set.local_sums();
  auto result = result_of(sums, sums.on_device ? 0 : set.loss_scale().scale);
  result.step = steps_;
  return result;
}

StepResult StrategyCore::end_window(GradientSet& set, const StepCall& call) {
  const auto sums = [&] {
    const IntraOpThreads threads(pool_->threads_per_replica());
    return set.finish_window(call.fused);
  }();
  if (sums.stop_requested) stopping_ = true;
  const bool reported_here = std::all_of(sums.failures.begin(), sums.failures.end(),
                                         [&](const auto& failed) { return failed.rank == topology_.rank; });
  if (!reported_here && !set.told()) raise_failures({}, &sums);
  auto result = result_of(sums, sums.on_device ? 0 : set.loss_scale().scale);
  result.step = steps_;
  if (sums.dropped || !sums.failures.empty()) {
    result.loss = host_scalar(std::numeric_limits<double>::quiet_NaN());
    return result;
  }
  result.stepped = true;
  result.step = ++steps_;
  result.grad_norm = sums.on_device ? sums.report.grad_norm() : host_scalar(sums.grad_norm);
  if (sums.finite && call.apply) {
    poll_ = call.poll;
    const auto forget = c10::make_scope_exit([&] { poll_ = nullptr; });
    const IntraOpThreads threads(pool_->threads_per_replica());
    call.apply();
    if (call.fused) result.grad_norm = set.grad_norm();
    at::autocast::clear_cache();
  }
  count_skipped(set, sums);
  return result;
}

void StrategyCore::count_skipped(GradientSet& set, const WindowSums& sums) {
  int64_t last_step = steps_;
  std::string where = sums.non_finite_at;
  if (sums.on_device) {
    if (is_capturing(topology_.devices.front())) return;
    skip_watch_.note(sums.report, steps_, sums.non_finite_at);
    skip_watch_.look();
    skipped_in_a_row_ = skip_watch_.in_a_row();
    last_step = skip_watch_.step();
    where = skip_watch_.non_finite_at();
    // Looking waits for the device: only when it is nearly time to say where.
    set.locate_non_finite(options_.max_skipped <= 1 || 2 * skipped_in_a_row_ >= options_.max_skipped);
  } else {
    skipped_in_a_row_ = sums.finite ? 0 : skipped_in_a_row_ + 1;
    set.locate_non_finite(!sums.finite || options_.max_skipped <= 1);
  }
  if (skipped_in_a_row_ < options_.max_skipped || skipped_in_a_row_ == 0) return;
  throw NonFinite("the gradient was not finite in " + std::to_string(skipped_in_a_row_) +
                  " windows in a row, the last at step " + std::to_string(last_step) +
                  (where.empty() ? std::string() : ", first in " + where) +
                  "; lower the learning rate, clip the norm, or check the data; max_skipped raises the limit");
}

FlatOptimizer StrategyCore::make_flat(const std::vector<std::pair<int, uint32_t>>& parameters,
                                      const FlatGroups& groups) const {
  std::vector<FlatParameter> flat;
  for (const auto& [index, group] : parameters) {
    const auto p = static_cast<size_t>(index);
    flat.push_back({registry_.name(p), registry_.parameter(0, p), group});
  }
  const Shard shard = options_.shard_optimizer ? Shard{topology_.rank, topology_.num_workers} : Shard{};
  return FlatOptimizer(std::move(flat), groups, shard);
}

void StrategyCore::step_flat(int set, FlatOptimizer& optimizer, const std::vector<int>& parameters,
                             const FlatGroups& groups) {
  check_open();
  sets_.at(static_cast<size_t>(set))->step(optimizer, parameters, groups, [this](const ReplicaPool::Task& work) {
    pool_->run(work, poll_);
  });
}

}  // namespace muster
