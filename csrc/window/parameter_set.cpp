#include "window/parameter_set.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <numeric>
#include <unordered_set>
#include <utility>

#include "core/plain_memory.h"
#include "core/replica_context.h"
#include "device/kernel_status.h"
#include "muster/error.h"
#include "window/device_shares.h"
#include "window/device_window.h"
#include "window/host_window.h"
#include "window/memory_check.h"

namespace muster {

namespace {

void check_loss(const at::Tensor& value, c10::Device device) {
  if (!value.defined() || value.dim() != 0 || !is_floating(value)) {
    throw InvalidArgument("the step function must return a 0-dim floating tensor or a Loss; it returned " +
                          (value.defined() ? "a tensor of shape " + c10::str(value.sizes()) + " and dtype " +
                                                 c10::toString(value.scalar_type())
                                           : std::string("nothing")));
  }
  if (!value.requires_grad()) {
    throw InvalidArgument(
        "the loss does not depend on any parameter that requires a gradient; compute it from the "
        "prepared model, with gradients enabled");
  }
  if (value.device() != device) {
    throw InvalidArgument("the loss is on " + value.device().str() + ", its replica on " + device.str() +
                          "; return it from where the module computed it");
  }
}

}  // namespace

ParameterSet::ParameterSet(ParameterRegistry& registry, const Topology& topology, const Groups& groups,
                           const StrategyOptions& options, const void* strategy, std::vector<int> parameters)
    : registry_(registry),
      topology_(topology),
      groups_(groups),
      options_(options),
      parameters_(std::move(parameters)),
      sums_(registry, topology, groups, options, strategy),
      replicas_(topology.devices.size()),
      devices_divide_(devices_divide(topology, options)),
      replicas_have_shards_(replicas_have_shards(topology, options)) {
  const WindowContext context{registry_, topology_, groups_, options_, sums_};
  if (divides_steps(topology, groups, options)) divided_ = std::make_unique<DividedUpdate>(context);
  if (is_streamed(topology.devices.front())) {
    window_ = std::make_unique<DeviceWindow>(context);
  } else if (groups.servers) {
    auto window = std::make_unique<ServerWindow>(context, *context.groups.servers);
    servers_ = window.get();
    window_ = std::move(window);
  } else {
    window_ = std::make_unique<HostWindow>(context, divided_.get());
  }
}

void ParameterSet::connect_servers(FlatOptimizer& optimizer, const std::vector<int>& parameters,
                                   const FlatGroups& groups) {
  if (servers_ == nullptr) throw InvalidArgument("this strategy has no parameter servers; use ParameterServerStrategy");
  build_engines();
  servers_->connect(optimizer, parameters, groups);
}

void ParameterSet::build_engines() {
  if (servers() != nullptr) {
    throw InvalidArgument(
        "the parameters to train, their dtypes or their memory order changed after the first step, which parameter "
        "servers cannot follow; freeze, unfreeze, add_param_group and convert before it");
  }
  GradientSums::Deliver deliver;
  if (servers_ != nullptr) {
    deliver = [this](size_t p, const at::Tensor& sum) { servers_->take(p, sum); };
  }
  sums_.build(parameters_, deliver);
}

void ParameterSet::check_no_complex() const {
  const char* why = nullptr;
  if (groups_.servers) {
    why =
        "parameter servers hold real ones; keep its real and imaginary parts as a real parameter, or use another "
        "strategy";
  } else if (options_.clip_norm_type != 2) {
    why = "norms of other types than 2 are taken of real gradients alone; leave clip_norm_type at 2";
  }
  if (why == nullptr) return;
  for (const int p : parameters_) {
    if (!registry_.parameter(0, static_cast<size_t>(p)).is_complex()) continue;
    throw InvalidArgument("parameter '" + registry_.name(static_cast<size_t>(p)) + "' is complex, and " + why);
  }
}

void ParameterSet::open_micro_batch(bool last, bool fused, const std::vector<OptimizerStep>& steps,
                                    const std::vector<size_t>& outsiders, bool computes) {
  if (!window_open()) {
    check_no_complex();
    if (servers_ == nullptr) {
      for (const auto& step : steps) {
        if (step.flat != nullptr) step.flat->follow_shapes();
      }
    }
    if (servers_ != nullptr && (servers() == nullptr || !fused)) {
      throw InvalidArgument(
          "parameter servers step AdamW, Adam, SGD or Adagrad alone (in C++ those of muster::optim); prepare() one "
          "over the parameters to train");
    }
    if (servers() != nullptr) {
      for (const auto& step : steps) servers()->plan().check_groups(step.groups);
    }
    find_written(outsiders);
    drop_gradients_of_frozen();
    // Servers first say what was written: who loads a module writes its parameters, and moves them besides.
    window_->open();
    if (sums_.begin_window(parameters_)) {
      build_engines();
      agreed_ = {};
    }
    replicas_.assign(replicas_.size(), {});
    told_.raised = false;
  } else if (const int p = sums_.first_untrained(); computes && p >= 0) {
    throw InvalidArgument("parameter '" + registry_.name(static_cast<size_t>(p)) +
                          "' was unfrozen within a window of several micro-batches, whose first ones have no gradient "
                          "of it; unfreeze it between windows: after a step that says `stepped`, or flush()");
  } else if (last) {
    find_written_within();
  }
  last_ = last;
  if (divided_) divided_->bring_back();
  sums_.set_to_owners(last && fused && divided_ && !options_.keep_gradients);
  divide(fused, steps);
  ++micro_batches_;
  for (auto& replica : replicas_) replica.began = false;
}

// For a window whose step is flat, or of several workers' shards. A step that reads `.grad` needs whole sums, which
// are not divided.
void ParameterSet::divide(bool fused, const std::vector<OptimizerStep>& steps) {
  sums_.set_division({});
  if (!last_ || !(replicas_have_shards_ || (devices_divide_ && fused))) return;
  std::vector<int64_t> made_from(sums_.trainable().begin(), sums_.trainable().end());
  for (const auto& step : steps) {
    made_from.push_back(step.flat == nullptr ? -2 : -1);  // each optimizer divides its own
    for (const int p : step.parameters) {
      made_from.push_back(p);
      made_from.push_back(registry_.parameter(0, static_cast<size_t>(p)).numel());
    }
  }
  next_ = made_from == agreed_.made_from ? agreed_ : Division{std::move(made_from), shards_of(steps)};
  if (replicas_have_shards_) return sums_.set_division({agreed_.shards, own_part(agreed_.shards)});
  agreed_ = next_;  // with nobody else
  // Several workers all need the sums.
  sums_.set_division({topology_.num_workers == 1 ? agreed_.shards : nullptr, agreed_.shards});
}

// Of shards by replica of the job those of this process, where its devices divide steps.
std::shared_ptr<const Shards> ParameterSet::own_part(const std::shared_ptr<const Shards>& shards) const {
  if (!shards || !devices_divide_) return nullptr;
  const auto first = shards->begin() + topology_.first_replica;
  return std::make_shared<Shards>(first, first + topology_.local_replicas());
}

// Null where an optimizer is not flat, two have a parameter, or devices would have to divide one with gaps in its
// memory.
std::shared_ptr<const Shards> ParameterSet::shards_of(const std::vector<OptimizerStep>& steps) const {
  const auto parts = replicas_have_shards_ ? topology_.replicas_of_worker : std::vector{topology_.local_replicas()};
  auto shards = std::make_shared<Shards>(std::accumulate(parts.begin(), parts.end(), size_t{0}));
  for (auto& shard : *shards) shard.resize(sums_.trainable().size());
  // The first one's, where no optimizer has the parameter: its sum counts in the norm.
  const auto& parameters = sums_.engine(0).parameters();
  for (size_t p = 0; p < parameters.size(); ++p) shards->front()[p] = {0, num_reals(parameters[p].tensor)};
  std::vector<bool> is_divided(parameters.size());
  for (const auto& step : steps) {
    if (step.flat == nullptr) return nullptr;
    const auto runs = step.flat->state().runs_for(parts);
    for (size_t i = 0; i < step.parameters.size(); ++i) {
      const int index = sums_.index_of(step.parameters[i]);
      if (index < 0) continue;
      const auto p = static_cast<size_t>(index);
      if (is_divided[p]) return nullptr;
      if (devices_divide_ && !parameters[p].tensor.is_non_overlapping_and_dense()) return nullptr;
      is_divided[p] = true;
      for (size_t s = 0; s < shards->size(); ++s) (*shards)[s][p] = runs.at(s)[i];
    }
  }
  return shards;
}

// Once workers agree on what they step by.
void ParameterSet::follow_division(bool fused) {
  if (!replicas_have_shards_) return;
  if (sums_.division().receivers && (!fused || next_.made_from != agreed_.made_from)) sums_.make_whole();
  agreed_ = agreement_ ? next_ : Division{};
}

// An optimizer that steps from `.grad` would step them from what was left there between steps.
void ParameterSet::drop_gradients_of_frozen() {
  for (const auto& of_replica : registry_.parameters()) {
    for (const int p : parameters_) {
      const auto& parameter = of_replica[static_cast<size_t>(p)];
      if (!parameter.requires_grad()) parameter.mutable_grad().reset();
    }
  }
}

void ParameterSet::find_written(const std::vector<size_t>& outsiders) {
  written_.clear();
  agreement_.reset();
  // A graph cannot bring values to the host: the next window outside of one compares them.
  if (groups_.servers || is_capturing(topology_.devices.front())) return;
  for (const int p : parameters_) note_if_written(static_cast<size_t>(p));
  for (const size_t p : outsiders) note_if_written(p);
  if (written_.empty()) return;
  std::vector<MemoryOwner> owners;
  for (size_t p = 0; p < registry_.num_parameters(); ++p)
    owners.push_back({"parameter", registry_.name(p), registry_.parameter(0, p)});
  check_share_no_memory(owners);
  if (topology_.num_workers > 1) return;
  for (const int p : written_) registry_.note_agreed(static_cast<size_t>(p));  // there is nobody to compare with
}

// Between the micro-batches of a window, besides what was found before it, which counts as written still.
void ParameterSet::find_written_within() {
  if (groups_.servers || topology_.num_workers == 1 || is_capturing(topology_.devices.front())) return;
  const std::unordered_set<int> known(written_.begin(), written_.end());
  for (const int p : parameters_) {
    if (!known.contains(p) && !registry_.expects_writes(static_cast<size_t>(p)))
      note_if_written(static_cast<size_t>(p));
  }
}

void ParameterSet::note_if_written(size_t p) {
  if (!registry_.was_written(p)) return;
  registry_.doubt(p);
  written_.push_back(static_cast<int>(p));
}

void ParameterSet::agree_on(std::vector<OptimizerStep> steps) {
  agreement_.emplace(registry_, std::move(steps), window_->loss_scale().on_host(), written_, divided_ != nullptr);
}

comm::QueuedOperations* ParameterSet::open_window(int local_replica, double rows) {
  auto& engine = sums_.engine(static_cast<size_t>(local_replica));
  if (micro_batches_ == 1) {
    engine.open_window();
    window_->weigh(local_replica, rows);
  }
  return last_ ? &engine.queue() : nullptr;
}

void ParameterSet::begin_engine(int local_replica, const NotedPart& part) {
  const auto r = static_cast<size_t>(local_replica);
  GradientEngine::MicroBatch micro_batch;
  micro_batch.first = micro_batches_ == 1;
  micro_batch.last = last_;
  micro_batch.contributes = part.contributes;
  micro_batch.factor = part.factor;
  micro_batch.gate = part.gate;
  micro_batch.to_owners = sums_.go_to_owners();
  micro_batch.shards = sums_.division().receivers;
  micro_batch.locate_non_finite = locate_non_finite_ && !is_capturing(topology_.devices[r]);
  replicas_[r].began = true;
  sums_.engine(r).begin(micro_batch);
}

void ParameterSet::backward(int local_replica, const Loss& loss, double rows) {
  const auto r = static_cast<size_t>(local_replica);
  check_loss(loss.value, topology_.devices[r]);
  // Gradients that cross from one replica to another on the way have to be weighed before.
  const auto replica = current_replica();
  const bool crosses = topology_.num_replicas > 1 && replica && replica->collectives > 0;
  const auto part = window_->note({.local_replica = local_replica,
                                   .loss = &loss,
                                   .rows = rows,
                                   .is_first = micro_batches_ == 1,
                                   .crosses = crosses});
  begin_engine(local_replica, part);
  const GradientMemory::Scope scope(sums_.engine(r).memory());
  torch::autograd::backward({loss.value}, {part.seed});
}

std::exception_ptr ParameterSet::end_micro_batch(int local_replica, bool failed) noexcept {
  const auto r = static_cast<size_t>(local_replica);
  auto& engine = sums_.engine(r);
  try {
    if (!replicas_[r].began) {
      const auto part = window_->note({.local_replica = local_replica, .is_first = micro_batches_ == 1});
      begin_engine(local_replica, part);
    }
    if (failed) engine.abandon();
    engine.flush();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

void ParameterSet::close_window(int local_replica, const Failure& own_failure, bool stop_requested) {
  auto& replica = replicas_[static_cast<size_t>(local_replica)];
  Closing closing;
  closing.failure = own_failure ? own_failure : replica.failure;
  closing.stop_requested = stop_requested;
  closing.has_hooks = told_.has_hooks;
  closing.agreement = agreement_ ? &*agreement_ : nullptr;
  replica.closed = window_->close(local_replica, closing);
}

std::vector<WindowSums::Failed> ParameterSet::failures_of(const std::vector<std::string>& texts) const {
  std::vector<WindowSums::Failed> failures;
  int worker = 0;
  int next_workers = topology_.replicas_of_worker.front();
  for (int replica = 0; replica < static_cast<int>(texts.size()); ++replica) {
    while (next_workers <= replica) next_workers += topology_.replicas_of_worker[static_cast<size_t>(++worker)];
    const auto& text = texts[static_cast<size_t>(replica)];
    if (text.empty()) continue;
    const auto end = text.find('\n');
    failures.push_back({worker, replica, {.type = text.substr(0, end), .text = text.substr(end + 1)}});
  }
  return failures;
}

std::string ParameterSet::non_finite_at(const Tail& tail) const {
  for (int replica = 0; replica < topology_.num_replicas; ++replica) {
    const auto parameter = static_cast<int>(tail.non_finite(replica)) - 1;
    if (parameter < 0) continue;
    const auto index = sums_.trainable()[static_cast<size_t>(parameter)];
    return "parameter '" + registry_.name(static_cast<size_t>(index)) + "' of replica " + std::to_string(replica);
  }
  return {};
}

// The window is dropped where something differs.
void ParameterSet::check_agreement(const Tail& tail) {
  if (!agreement_) return;
  const bool differs = std::any_of(&tail.digest(0), &tail.digest(0) + topology_.num_replicas,
                                   [&](double digest) { return digest != tail.digest(0); });
  if (!differs && tail.writes() == 0) return;
  try {
    if (differs) agreement_->throw_difference(*groups_.workers);
    for (const int p : agreement_->compare_values(*groups_.workers)) registry_.note_agreed(static_cast<size_t>(p));
    agreement_->note_agreed();
  } catch (const LayoutMismatch&) {
    drop_window();
    throw;
  }
}

// Every rank reads the same tail, and so takes the same way through here: collectives that only some ends or outcomes
// have (agreement, norm, servers) meet on all ranks. A window that changes nothing still reaches Window::finish, where
// servers count it.
WindowSums ParameterSet::finish_window(bool fused) {
  const at::NoGradGuard no_grad;
  const auto& closed = replicas_.front().closed;
  const auto& tail = closed.tail;
  WindowSums sums;
  sums.stop_requested = tail[Tail::stops] > 0;
  told_.hooked = tail[Tail::hooks] > 0;
  told_.failed = tail[Tail::failures] > 0;
  told_.edited = nullptr;
  if (told_.failed) {
    sums.failures = failures_of(closed.failures);
  } else {
    sums.weight = tail[Tail::weight];
    sums.dropped = sums.weight <= 0;
  }
  const bool mixes = !sums.ends_unchanged() && tail[Tail::sum_losses] > 0 && tail[Tail::mean_losses] > 0;
  if (told_.failed || sums.dropped || mixes) {
    sums.dropped = sums.dropped || mixes;
    drop_window();
    window_->finish(tail, fused, sums);
    if (!mixes) return sums;
    throw InvalidArgument(
        "replicas or micro-batches of one window returned losses of both reductions; return "
        "reduction=\"mean\" or \"sum\" throughout");
  }
  check_agreement(tail);
  follow_division(fused);
  sums.non_finite_at = non_finite_at(tail);
  micro_batches_ = 0;
  window_->finish(tail, fused, sums);
  return sums;
}

void ParameterSet::step(FlatOptimizer& optimizer, const std::vector<int>& parameters, const FlatGroups& groups,
                        const OnReplicas& on_replicas) {
  const at::NoGradGuard no_grad;
  window_->update(replicas_.front().closed.tail, optimizer, parameters, groups, on_replicas);
}

kernels::StepScalars* ParameterSet::leave_means(const std::function<void()>& edit) {
  auto* const scalars = window_->leave_means(replicas_.front().closed.tail, edit);
  told_.edited = scalars;
  return scalars;
}

void ParameterSet::leave_memory() {
  if (divided_) divided_->leave_memory();
}

void ParameterSet::drop_window() noexcept {
  sums_.clear();
  micro_batches_ = 0;
}

}  // namespace muster
