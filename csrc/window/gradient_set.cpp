#include "window/gradient_set.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <sstream>
#include <utility>

#include "comm/text_exchange.h"
#include "core/replica_context.h"
#include "device/kernel_status.h"
#include "muster/error.h"
#include "window/memory_check.h"
#include "window/window_tail.h"

namespace muster {

bool divides_steps(const Topology& topology, const Groups& groups, const StrategyOptions& options) {
  return options.fuse && !options.shard_optimizer && topology.num_replicas > 1 &&
         !is_streamed(topology.devices.front()) && OwnerReduction::is_possible(*groups.gradients.front());
}

GradientSet::GradientSet(ParameterRegistry& registry, const Topology& topology, const Groups& groups,
                         const StrategyOptions& options, const void* strategy, std::vector<int> parameters)
    : registry_(registry),
      topology_(topology),
      groups_(groups),
      options_(options),
      strategy_(strategy),
      parameters_(std::move(parameters)),
      windows_(topology.devices.size()),
      loss_scaling_(options.loss_scale),
      divides_steps_(divides_steps(topology, groups, options)) {
  if (!loss_scaling_ && options.precision == Precision::fp16) loss_scaling_ = LossScale();
  if (loss_scaling_) loss_scale_.scale = static_cast<float>(loss_scaling_->init);
  if (!is_streamed(topology.devices.front())) return;
  device_buffers_.resize(topology.devices.size());
  for (size_t r = 0; r < topology.devices.size(); ++r) {
    const auto device = topology.devices[r];
    const auto beside = std::find(topology.devices.begin(), topology.devices.end(), device) - topology.devices.begin();
    const OnDevice scope(device);
    device_windows_.push_back(std::make_unique<DeviceWindow>(
        device, static_cast<size_t>(beside) < r ? device_windows_[static_cast<size_t>(beside)]->shared_scalars()
                                                : std::make_shared<DeviceScalars>(device, loss_scale_)));
  }
}

kernels::LossScaleState GradientSet::loss_scale() const {
  return is_on_device() ? device_windows_.front()->scalars().read_scale() : loss_scale_;
}

void GradientSet::set_loss_scale(const kernels::LossScaleState& state) {
  loss_scale_ = state;
  for (auto& window : device_windows_) {
    const OnDevice scope(window->device());
    window->shared_scalars()->set_scale(state);
  }
}

void GradientSet::set_parameters(std::vector<int> parameters) { parameters_ = std::move(parameters); }

void GradientSet::set_ignored(bool ignored) noexcept {
  for (auto& engine : engines_) engine->set_ignored(ignored);
}

bool GradientSet::layout_is_stale() const {
  if (engines_.empty()) return true;
  const auto& specs = engines_.front()->parameters();
  size_t next = 0;
  for (int p : parameters_) {
    const auto& parameter = registry_.parameter(0, static_cast<size_t>(p));
    if (!parameter.requires_grad()) continue;
    if (next == trainable_.size() || trainable_[next] != p) return true;
    const auto& slot = engines_.front()->slot(next);
    if (!specs[next].tensor.is_same(parameter) || !engines_.front()->watches(next)) return true;
    if (slot.defined() && (slot.sizes() != parameter.sizes() || slot.is_complex() != parameter.is_complex() ||
                           c10::toRealValueType(slot.scalar_type()) !=
                               accumulation_dtype(c10::toRealValueType(parameter.scalar_type())))) {
      return true;
    }
    ++next;
  }
  return next != trainable_.size();
}

void GradientSet::build_engines() {
  if (servers_) {
    throw InvalidArgument(
        "the parameters to train, or their dtypes, changed after the first step, which parameter servers cannot "
        "follow; freeze, unfreeze and add_param_group before it");
  }
  trainable_.clear();
  for (int p : parameters_) {
    if (registry_.parameter(0, static_cast<size_t>(p)).requires_grad()) {
      trainable_.push_back(p);
      continue;
    }
    // A parameter that was frozen keeps no gradient for the optimizer to step from again.
    for (size_t r = 0; r < windows_.size(); ++r) {
      registry_.parameter(r, static_cast<size_t>(p)).mutable_grad().reset();
    }
  }
  if (trainable_.empty()) {
    throw InvalidArgument("none of the parameters to train has requires_grad; unfreeze one before step()");
  }
  trainable_index_.assign(registry_.num_parameters(), -1);
  for (size_t p = 0; p < trainable_.size(); ++p)
    trainable_index_[static_cast<size_t>(trainable_[p])] = static_cast<int>(p);
  engines_.clear();
  for (size_t r = 0; r < windows_.size(); ++r) {
    std::vector<NamedParameter> parameters;
    for (int p : trainable_) {
      const auto index = static_cast<size_t>(p);
      const bool has_rows = groups_.servers && registry_.rows_of(index) != nullptr;
      parameters.push_back({registry_.name(index), registry_.parameter(r, index), has_rows});
    }
    GradientEngineOptions options;
    options.bucket_bytes = groups_.buckets.usual;
    options.first_bucket_bytes = groups_.buckets.first;
    options.last_bucket_bytes = groups_.buckets.last;
    if (options_.wire == Wire::bf16 && topology_.num_replicas > 1) options.wire = at::kBFloat16;
    options.overlap = groups_.overlap;
    options.norm_type = options_.clip_norm_type;
    options.receive = r == 0;
    options.control = groups_.control_of(r);
    if (groups_.servers) options.deliver = [this](size_t p, const at::Tensor& sum) { servers_->take(p, sum); };
    options.strategy = strategy_;
    options.replica = topology_.first_replica + static_cast<int>(r);
    options.has_neighbours = topology_.local_replicas() > 1;
    engines_.push_back(std::make_unique<GradientEngine>(std::move(parameters), groups_.gradients[r], options));
  }
}

void GradientSet::check_no_complex() const {
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

void GradientSet::open_micro_batch(bool last, bool fused) {
  if (!window_open()) {
    check_no_complex();
    if (awaits_servers() || (servers_ && !fused)) {
      throw InvalidArgument(
          "parameter servers step AdamW, Adam, SGD or Adagrad alone (in C++ those of muster::optim); prepare() one "
          "over the parameters to train");
    }
    find_written();
    if (layout_is_stale()) build_engines();
    if (servers_) servers_->open();
    windows_.assign(windows_.size(), {});
    for (auto& window : windows_) window.unit = scalars_.unit;
    if (!is_on_device() && (noted_buffers_.empty() || noted_buffers_.front().size() != registry_.buffers(0).size())) {
      note_buffers();
    }
    told_ = false;
  }
  last_ = last;
  if (home_) home_->bring_back();
  to_owners_ = last && fused && divides_steps_ && !options_.keep_gradients;
  ++micro_batches_;
  for (auto& window : windows_) window.began = false;
}

void GradientSet::find_written() {
  written_.clear();
  agreement_.reset();
  if (groups_.servers) return;
  for (const int p : parameters_) {
    if (!registry_.was_written(static_cast<size_t>(p))) continue;
    registry_.doubt(static_cast<size_t>(p));
    written_.push_back(p);
  }
  if (written_.empty()) return;
  std::vector<MemoryOwner> owners;
  for (size_t p = 0; p < registry_.num_parameters(); ++p)
    owners.push_back({"parameter", registry_.name(p), registry_.parameter(0, p)});
  check_share_no_memory(owners);
}

void GradientSet::agree_on(std::vector<OptimizerStep> steps) {
  agreement_.emplace(registry_, std::move(steps), written_, divides_steps_);
}

void GradientSet::note_agreed() {
  for (const int p : parameters_) registry_.note_agreed(static_cast<size_t>(p));
}

void GradientSet::open_window(int local_replica, double rows) {
  if (micro_batches_ != 1) return;
  const auto r = static_cast<size_t>(local_replica);
  engines_[r]->open_window();
  if (has_unit_) return;
  // No earlier window tells the weights; samples are a good guess.
  const auto parts = at::zeros({2}, at::kDouble);
  if (rows > 0) {
    parts.data_ptr<double>()[0] = rows;
    parts.data_ptr<double>()[1] = 1;
  }
  auto& replicas = servers_ && servers_->is_synchronous() ? *groups_.workers : *groups_.control_of(r);
  replicas.all_reduce(parts, ReduceOp::sum).wait();
  const double* sums = parts.const_data_ptr<double>();
  if (sums[1] > 0) windows_[r].unit = sums[0] / sums[1];
  if (is_on_device()) device_windows_[r]->shared_scalars()->set_unit(windows_[r].unit);
}

// `factor`: what the gradients weigh in the sums, where the host knows.
void GradientSet::begin_engine(int local_replica, bool contributes, bool overlaps, double factor) {
  GradientEngine::MicroBatch micro_batch;
  micro_batch.first = micro_batches_ == 1;
  micro_batch.last = last_;
  micro_batch.contributes = contributes;
  micro_batch.overlaps = overlaps;
  micro_batch.factor = factor;
  micro_batch.to_owners = to_owners_;
  if (is_on_device()) micro_batch.gate = device_windows_[static_cast<size_t>(local_replica)]->gate();
  const auto device = topology_.devices[static_cast<size_t>(local_replica)];
  micro_batch.locate_non_finite = locate_non_finite_ && !is_capturing(device);
  windows_[static_cast<size_t>(local_replica)].began = true;
  engines_[static_cast<size_t>(local_replica)]->begin(micro_batch);
}

void GradientSet::backward(int local_replica, const Loss& loss, double rows, bool overlaps) {
  const auto& value = loss.value;
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
  const auto device = topology_.devices[static_cast<size_t>(local_replica)];
  if (value.device() != device) {
    throw InvalidArgument("the loss is on " + value.device().str() + ", its replica on " + device.str() +
                          "; return it from where the module computed it");
  }
  const bool is_known = !loss.weight || !is_on_device() ||
                        !device_windows_[static_cast<size_t>(local_replica)]->is_unknown_to_host(*loss.weight);
  const double weight = !is_known ? 1 : loss.weight ? loss.weight->item<double>() : rows;
  if (weight < 0 || !std::isfinite(weight)) {
    throw InvalidArgument("the weight of a loss must be finite and not negative; it is " + std::to_string(weight));
  }
  auto& window = windows_[static_cast<size_t>(local_replica)];
  const bool contributes = weight > 0;
  // Gradients that cross from one replica to another on the way have to be weighed before.
  const auto replica = current_replica();
  const bool crosses = topology_.num_replicas > 1 && replica && replica->collectives > 0;
  if (is_on_device()) {
    auto& device_window = *device_windows_[static_cast<size_t>(local_replica)];
    auto seed = device_window.note(loss, rows, micro_batches_ == 1);
    if (crosses) {
      const at::NoGradGuard no_grad;
      const auto share =
          at::from_blob(const_cast<double*>(device_window.gate()), {}, at::TensorOptions(at::kDouble).device(device));
      seed = (seed.to(at::kDouble) * share).to(seed.scalar_type());
      share.copy_(share.ne(0));
    }
    if (contributes) {
      window.contributions += 1;
      (loss.reduction == Reduction::mean ? window.mean_losses : window.sum_losses) += 1;
    }
    begin_engine(local_replica, contributes, overlaps);
    torch::autograd::backward({value}, {seed});
    return;
  }
  if (contributes) {
    window.weight += weight;
    window.weighted_loss += (loss.reduction == Reduction::mean ? weight : 1.0) * value.item<double>();
    window.contributions += 1;
    (loss.reduction == Reduction::mean ? window.mean_losses : window.sum_losses) += 1;
    for (const auto& [name, metric] : loss.metrics) {
      check_metric(name, metric);
      window.metrics[name].add({weight * metric.item<double>(), weight});
    }
  }
  const bool is_mean = loss.reduction == Reduction::mean;
  const double share = contributes && is_mean ? weight / window.unit : 1.0;
  begin_engine(local_replica, contributes, overlaps, crosses ? 1.0 : share);
  const double seed = contributes ? (crosses ? share : 1.0) * static_cast<double>(loss_scale_.scale) : 0.0;
  const GradientMemory::Scope scope(engines_[static_cast<size_t>(local_replica)]->memory());
  torch::autograd::backward({value}, {at::scalar_tensor(seed, value.options().requires_grad(false))});
}

std::exception_ptr GradientSet::end_micro_batch(int local_replica, bool failed) noexcept {
  auto& engine = *engines_[static_cast<size_t>(local_replica)];
  try {
    if (!windows_[static_cast<size_t>(local_replica)].began) {
      if (is_on_device()) device_windows_[static_cast<size_t>(local_replica)]->note_absence(micro_batches_ == 1);
      begin_engine(local_replica, false);
    }
    if (failed) engine.abandon();
    engine.flush();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

GradientSet::Tail GradientSet::tail_of(const at::Tensor& tail) const {
  return {tail, topology_.num_replicas, static_cast<int64_t>(trainable_.size()),
          static_cast<int64_t>(registry_.buffers(0).size())};
}

void GradientSet::close_window(int local_replica, const Failure& own_failure, bool stop_requested) {
  const auto r = static_cast<size_t>(local_replica);
  const auto& window = windows_[r];
  const Failure& failure = own_failure ? own_failure : window.failure;
  auto& engine = *engines_[r];
  const int replica = topology_.first_replica + local_replica;
  const auto& buffers = registry_.buffers(r);

  // Where replicas work on streams: how many replicas noted each metric that all know.
  int64_t extra = 0;
  if (is_on_device()) {
    extra = static_cast<int64_t>(device_windows_[r]->names().size());
  } else {
    for (const auto& buffer : buffers) extra += is_averaged(buffer) ? num_doubles(buffer) : 0;
  }
  const auto tail =
      tail_of(at::zeros({Tail::fields + Tail::numbers_of(topology_.num_replicas) +
                         2 * static_cast<int64_t>(trainable_.size()) + static_cast<int64_t>(buffers.size()) + extra},
                        at::kDouble));
  tail[Tail::failures] = failure ? 1 : 0;
  tail[Tail::stops] = stop_requested ? 1 : 0;
  if (agreement_) {
    tail.digest(replica) = agreement_->digest();
    tail.writes() = agreement_->has_writes() ? 1 : 0;
  }
  tail[Tail::hooks] = has_hooks_ ? 1 : 0;
  if (!failure) {
    tail[Tail::contributions] = window.contributions;
    tail[Tail::mean_losses] = window.mean_losses;
    tail[Tail::sum_losses] = window.sum_losses;
    tail.non_finite(replica) = engine.first_non_finite() + 1;
    engine.add_counts(tail.counts());
  }
  if (servers_) push_rows(failure);
  if (is_on_device()) {
    close_on_device(r, tail, failure);
  } else if (servers_ && servers_->is_synchronous()) {
    close_on_servers(tail, failure);
  } else {
    close_on_host(r, tail, failure);
  }
  if (tail[Tail::failures] > 0) return;
  if (!servers_) engine.reduce_sparse(tail.counts());
  if (tail[Tail::weight] > 0) engine.learn_order(tail.counts());
}

// What the host knows of the window; buffers that are averaged weigh `buffer_share`.
void GradientSet::fill_tail(size_t r, const Tail& tail, const Failure& failure, double buffer_share) {
  const auto& window = windows_[r];
  if (!failure) {
    tail[Tail::weight] = window.weight;
    tail[Tail::weighted_loss] = window.weighted_loss;
    tail[Tail::metrics] = window.metrics.empty() ? 0 : 1;
  }
  const auto& buffers = registry_.buffers(r);
  double* next_mean = tail.extra();
  for (size_t b = 0; b < buffers.size(); ++b) {
    tail.written()[b] = was_written(r, b) ? 1 : 0;
    if (!is_averaged(buffers[b])) continue;
    auto target = doubles_like(buffers[b], next_mean);
    if (buffer_share > 0) target.copy_(as_real(buffers[b])).mul_(buffer_share);
    next_mean += num_doubles(buffers[b]);
  }
}

// Integer buffers, one after the other.
at::Tensor GradientSet::integers_of(size_t r) const {
  std::vector<at::Tensor> integers{at::empty({0}, at::kLong)};
  for (const auto& buffer : registry_.buffers(r)) {
    if (!is_averaged(buffer)) integers.push_back(buffer.reshape({-1}).to(at::kLong));
  }
  return at::cat(integers);
}

std::string GradientSet::metrics_of(size_t r) const {
  std::ostringstream text;
  text << std::hexfloat;
  for (const auto& [name, metric] : windows_[r].metrics)
    text << metric.sum << ' ' << metric.weight << ' ' << name << '\n';
  return text.str();
}

void GradientSet::close_on_host(size_t r, const Tail& tail, const Failure& failure) {
  auto& window = windows_[r];
  auto& communicator = *groups_.gradients[r];
  const bool chief_only = options_.buffers == Buffers::chief;
  fill_tail(r, tail, failure, chief_only ? (communicator.rank() == 0 ? 1.0 : 0.0) : window.weight);
  const auto integer_values = integers_of(r);
  // Who has the tail's sum knows then that the statistics of all owners are there.
  if (to_owners_) engines_[r]->wait();
  auto tail_work = communicator.all_reduce(tail.tensor, ReduceOp::sum, tail.tensor.numel());
  comm::Work integer_work;
  if (integer_values.numel() > 0) {
    integer_work =
        chief_only ? communicator.broadcast(integer_values, 0) : communicator.all_reduce(integer_values, ReduceOp::max);
  }
  engines_[r]->wait();
  tail_work.wait();
  if (to_owners_) engines_[r]->release_gradients();
  integer_work.wait();
  window.tail = tail.tensor;
  window.integer_buffers = integer_values;

  if (tail[Tail::failures] > 0) {
    window.failures = exchange_texts(communicator, failure ? failure.type + '\n' + failure.text : std::string());
    if (servers_) window.failures.insert(window.failures.begin(), static_cast<size_t>(topology_.first_replica), "");
    return;
  }
  if (tail[Tail::metrics] > 0) window.metric_texts = exchange_texts(communicator, metrics_of(r));
}

}  // namespace muster
