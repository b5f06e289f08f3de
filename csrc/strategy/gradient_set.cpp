#include "strategy/gradient_set.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <sstream>
#include <utility>

#include "comm/kernel_dtype.h"
#include "kernels/kernels.h"
#include "kernels/math.h"
#include "muster/error.h"
#include "optimizer/gradient_norm.h"
#include "strategy/text_exchange.h"

namespace muster {

namespace {

constexpr int64_t kFirstBucketBytes = 1 << 20;

bool is_floating(const at::Tensor& tensor) { return at::isFloatingType(tensor.scalar_type()); }

}  // namespace

// The tail: numbers of a window that every replica needs the sums of. fp64, so that weights are exact to 2^53.
struct GradientSet::Tail {
  enum Field : int64_t {
    weight = kernels::kWeight,
    weighted_loss = kernels::kWeightedLoss,
    contributions = kernels::kContributions,
    failures = kernels::kFailures,
    stops = kernels::kStops,
    metrics = kernels::kMetrics,
    mean_losses = kernels::kMeanLosses,
    sum_losses = kernels::kSumLosses,
    fields = kernels::kTailFields
  };

  at::Tensor tensor;
  int64_t replicas;
  int64_t parameters;
  int64_t num_buffers;

  double* data() const { return tensor.data_ptr<double>(); }
  double& operator[](Field field) const { return data()[field]; }
  double& non_finite(int64_t replica) const { return data()[fields + replica]; }
  double* counts() const { return data() + fields + replicas; }
  double* written() const { return counts() + 2 * parameters; }
  double* buffers() const { return written() + num_buffers; }
};

GradientSet::GradientSet(const ParameterRegistry& registry, const Topology& topology, const Groups& groups,
                         const StrategyOptions& options, const void* strategy, std::vector<int> parameters)
    : registry_(registry),
      topology_(topology),
      groups_(groups),
      options_(options),
      strategy_(strategy),
      parameters_(std::move(parameters)),
      windows_(topology.devices.size()),
      loss_scaling_(options.loss_scale) {
  if (!loss_scaling_ && options.precision == Precision::fp16) loss_scaling_ = LossScale();
  if (loss_scaling_) loss_scale_.scale = static_cast<float>(loss_scaling_->init);
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
    if (slot.defined() &&
        (slot.sizes() != parameter.sizes() || slot.scalar_type() != accumulation_dtype(parameter.scalar_type()))) {
      return true;
    }
    ++next;
  }
  return next != trainable_.size();
}

void GradientSet::build_engines() {
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
      parameters.push_back({registry_.name(index), registry_.parameter(r, index)});
    }
    GradientEngineOptions options;
    options.bucket_bytes = options_.bucket_bytes.value_or(kDefaultBucketBytes);
    options.first_bucket_bytes = std::min(kFirstBucketBytes, options.bucket_bytes);
    options.overlap = groups_.overlap;
    options.receive = r == 0;
    options.strategy = strategy_;
    options.replica = topology_.first_replica + static_cast<int>(r);
    engines_.push_back(std::make_unique<GradientEngine>(std::move(parameters), groups_.gradients[r], options));
  }
}

void GradientSet::open_micro_batch(bool last) {
  if (!window_open()) {
    if (layout_is_stale()) build_engines();
    windows_.assign(windows_.size(), {});
    for (auto& window : windows_) window.unit = scalars_.unit;
    if (noted_buffers_.empty() || noted_buffers_.front().size() != registry_.buffers(0).size()) note_buffers();
    told_ = false;
  }
  last_ = last;
  ++micro_batches_;
  for (auto& window : windows_) window.began = false;
}

void GradientSet::open_window(int local_replica, int64_t rows) {
  if (micro_batches_ != 1) return;
  const auto r = static_cast<size_t>(local_replica);
  engines_[r]->open_window();
  if (has_unit_) return;
  // No earlier window tells the weights; samples are a good guess.
  const auto parts = at::zeros({2}, at::kDouble);
  if (rows > 0) {
    parts.data_ptr<double>()[0] = static_cast<double>(rows);
    parts.data_ptr<double>()[1] = 1;
  }
  groups_.gradients[r]->all_reduce(parts, ReduceOp::sum).wait();
  const double* sums = parts.const_data_ptr<double>();
  if (sums[1] > 0) windows_[r].unit = kernels::nearest_power_of_two(sums[0] / sums[1]);
}

void GradientSet::begin_engine(int local_replica, bool contributes) {
  GradientEngine::MicroBatch micro_batch;
  micro_batch.first = micro_batches_ == 1;
  micro_batch.last = last_;
  micro_batch.contributes = contributes;
  micro_batch.locate_non_finite = locate_non_finite_;
  windows_[static_cast<size_t>(local_replica)].began = true;
  engines_[static_cast<size_t>(local_replica)]->begin(micro_batch);
}

void GradientSet::backward(int local_replica, const Loss& loss, double rows) {
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
  const double weight = loss.weight ? loss.weight->item<double>() : rows;
  if (weight < 0 || !std::isfinite(weight)) {
    throw InvalidArgument("the weight of a loss must be finite and not negative; it is " + std::to_string(weight));
  }
  auto& window = windows_[static_cast<size_t>(local_replica)];
  const bool contributes = weight > 0;
  if (contributes) {
    window.weight += weight;
    window.weighted_loss += (loss.reduction == Reduction::mean ? weight : 1.0) * value.item<double>();
    window.contributions += 1;
    (loss.reduction == Reduction::mean ? window.mean_losses : window.sum_losses) += 1;
    for (const auto& [name, metric] : loss.metrics) {
      if (metric.numel() != 1) {
        throw InvalidArgument("metric '" + name + "' has shape " + c10::str(metric.sizes()) +
                              "; metrics are 0-dim tensors or numbers");
      }
      window.weighted_metrics[name] += weight * metric.item<double>();
    }
  }
  begin_engine(local_replica, contributes);
  const double share = loss.reduction == Reduction::mean ? weight / window.unit : (contributes ? 1.0 : 0.0);
  const double seed = share * static_cast<double>(loss_scale_.scale);
  torch::autograd::backward({value}, {at::scalar_tensor(seed, value.options().requires_grad(false))});
}

std::exception_ptr GradientSet::end_micro_batch(int local_replica, bool failed) noexcept {
  auto& engine = *engines_[static_cast<size_t>(local_replica)];
  try {
    if (!windows_[static_cast<size_t>(local_replica)].began) begin_engine(local_replica, false);
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
  auto& window = windows_[r];
  const Failure& failure = own_failure ? own_failure : window.failure;
  auto& engine = *engines_[r];
  auto& communicator = *groups_.gradients[r];
  const int replica = topology_.first_replica + local_replica;
  const auto& buffers = registry_.buffers(r);

  int64_t floating = 0;
  int64_t integers = 0;
  for (const auto& buffer : buffers) (is_floating(buffer) ? floating : integers) += buffer.numel();
  const auto trainable = static_cast<int64_t>(trainable_.size());
  const auto tail = tail_of(at::zeros(
      {Tail::fields + topology_.num_replicas + 2 * trainable + static_cast<int64_t>(buffers.size()) + floating},
      at::kDouble));
  tail[Tail::failures] = failure ? 1 : 0;
  tail[Tail::stops] = stop_requested ? 1 : 0;
  if (!failure) {
    tail[Tail::weight] = window.weight;
    tail[Tail::weighted_loss] = window.weighted_loss;
    tail[Tail::contributions] = window.contributions;
    tail[Tail::metrics] = window.weighted_metrics.empty() ? 0 : 1;
    tail[Tail::mean_losses] = window.mean_losses;
    tail[Tail::sum_losses] = window.sum_losses;
    tail.non_finite(replica) = engine.first_non_finite() + 1;
    engine.add_counts(tail.counts());
  }
  const bool chief_only = options_.buffers == Buffers::chief;
  const double share = chief_only ? (replica == 0 ? 1.0 : 0.0) : window.weight;
  const auto integer_values = at::zeros({integers}, at::kLong);
  for (size_t b = 0; b < buffers.size(); ++b) tail.written()[b] = was_written(r, b) ? 1 : 0;
  double* next_floating = tail.buffers();
  int64_t offset = 0;
  for (const auto& buffer : buffers) {
    if (is_floating(buffer)) {
      auto target = at::from_blob(next_floating, buffer.sizes(), at::kDouble);
      if (share > 0) target.copy_(buffer).mul_(share);
      next_floating += buffer.numel();
    } else {
      auto target = integer_values.narrow(0, offset, buffer.numel()).view(buffer.sizes());
      target.copy_(buffer);
      offset += buffer.numel();
    }
  }
  auto tail_work = communicator.all_reduce(tail.tensor, ReduceOp::sum, tail.tensor.numel());
  comm::Work integer_work;
  if (integers > 0) {
    integer_work =
        chief_only ? communicator.broadcast(integer_values, 0) : communicator.all_reduce(integer_values, ReduceOp::max);
  }
  engine.wait();
  tail_work.wait();
  integer_work.wait();
  window.tail = tail.tensor;
  window.integer_buffers = integer_values;

  if (tail[Tail::failures] > 0) {
    window.failures = exchange_texts(communicator, failure ? failure.type + '\n' + failure.text : std::string());
    return;
  }
  if (tail[Tail::metrics] > 0) {
    std::ostringstream text;
    text << std::hexfloat;
    for (const auto& [name, value] : window.weighted_metrics) text << value << ' ' << name << '\n';
    window.metric_texts = exchange_texts(communicator, text.str());
  }
  engine.reduce_sparse(tail.counts());
  if (tail[Tail::weight] > 0) engine.learn_order(tail.counts());
}

int GradientSet::worker_of(int replica) const {
  int worker = 0;
  for (int before = topology_.replicas_of_worker.front(); before <= replica;) {
    before += topology_.replicas_of_worker[static_cast<size_t>(++worker)];
  }
  return worker;
}

void GradientSet::collect_metrics(WindowSums& sums) const {
  // Added in replica order, as many terms as there are replicas: equal on all ranks.
  std::map<std::string, double> totals;
  for (const auto& text : windows_.front().metric_texts) {
    std::istringstream lines(text);
    std::string line;
    while (std::getline(lines, line)) {
      const auto space = line.find(' ');
      totals[line.substr(space + 1)] += std::strtod(line.c_str(), nullptr);
    }
  }
  for (const auto& [name, total] : totals) sums.metrics[name] = total / sums.weight;
}

// The values of a parameter's sum: of its rows where they are sparse; undefined where nobody had a gradient.
const at::Tensor& GradientSet::values_of(const Tail& tail, size_t parameter) const {
  static const at::Tensor none;
  const auto& engine = *engines_.front();
  if (engine.sparse_sum(parameter).defined()) return engine.sparse_sum(parameter);
  return tail.counts()[parameter] > 0 ? engine.slot(parameter) : none;
}

bool GradientSet::all_finite(const Tail& tail) const {
  for (size_t p = 0; p < trainable_.size(); ++p) {
    const auto& values = values_of(tail, p);
    if (!values.defined()) continue;
    if (!at::isfinite(values.is_sparse() ? values._values() : values).all().item<bool>()) return false;
  }
  return true;
}

void GradientSet::take_norm(const Tail& tail, double loss_scale) {
  std::vector<at::Tensor> sums;
  for (size_t p = 0; p < trainable_.size(); ++p) {
    const auto& values = values_of(tail, p);
    if (values.defined()) sums.push_back(values.is_sparse() ? values._values() : values);
  }
  muster::take_norm(sums, tail.data(), options_.clip_norm.value_or(0), loss_scale, scalars_);
}

void GradientSet::edit_means(const std::function<void()>& edit) {
  const at::NoGradGuard no_grad;
  auto tail = tail_of(windows_.front().tail);
  std::vector<double> partials;
  for (size_t p = 0; p < trainable_.size(); ++p) {
    const auto& sum = values_of(tail, p);
    if (!sum.defined()) continue;
    const auto values = sum.is_sparse() ? sum._values() : sum;
    const auto n = static_cast<size_t>(values.numel());
    partials.resize(kernels::num_tiles(n));
    kernels::divide_with_stats(kernel_dtype(values.scalar_type()), values.mutable_data_ptr(), n, scalars_.divisor,
                               partials.data());
    const auto& parameter = engines_.front()->parameters()[p].tensor;
    parameter.mutable_grad() = sum.to(parameter.scalar_type());
  }
  edit();
  for (size_t p = 0; p < trainable_.size(); ++p) {
    const auto& mean = values_of(tail, p);
    const auto& edited = engines_.front()->parameters()[p].tensor.grad();
    if (!mean.defined() || !edited.defined() || edited.is_same(mean)) continue;
    if (edited.layout() != mean.layout()) {
      throw InvalidArgument("a hook replaced the gradient of '" + engines_.front()->parameters()[p].name +
                            "' by one of another layout; change it in place");
    }
    mean.copy_(edited);
  }
  tail.tensor = tail.tensor.clone();
  tail[Tail::sum_losses] = 1;  // nothing is left to divide by
  take_norm(tail, 1);
}

void GradientSet::step(FlatOptimizer& optimizer, const std::vector<int>& parameters, const FlatGroups& groups) {
  const at::NoGradGuard no_grad;
  const auto tail = tail_of(windows_.front().tail);
  std::vector<FlatGradient> gradients(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const int p = trainable_index_[static_cast<size_t>(parameters[i])];
    if (p < 0) continue;
    const auto& values = values_of(tail, static_cast<size_t>(p));
    if (!values.defined()) continue;
    (values.is_sparse() ? gradients[i].sparse : gradients[i].dense) = values;
  }
  optimizer.step(gradients, groups, scalars_, options_.keep_gradients);
  optimizer.gather_parameters(*groups_.workers);
  if (!options_.keep_gradients) return;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& mean = gradients[i].sparse.defined() ? gradients[i].sparse : gradients[i].dense;
    if (!mean.defined()) continue;
    const auto& parameter = registry_.parameter(0, static_cast<size_t>(parameters[i]));
    parameter.mutable_grad() = mean.to(parameter.scalar_type());
  }
}

void GradientSet::apply_mean(const Tail& tail, double divisor, WindowSums& sums) {
  const auto& engine = *engines_.front();
  struct Piece {
    at::Tensor values;
    at::Tensor gradient;
  };
  std::vector<Piece> pieces;
  std::vector<double> partials;
  double total = 0;
  for (size_t p = 0; p < trainable_.size(); ++p) {
    const auto& parameter = engine.parameters()[p].tensor;
    auto& gradient = parameter.mutable_grad();
    gradient.reset();
    const auto& sum = values_of(tail, p);
    if (!sum.defined()) continue;
    Piece piece{sum.is_sparse() ? sum._values() : sum, sum};
    const auto n = static_cast<size_t>(piece.values.numel());
    partials.resize(kernels::num_tiles(n));
    kernels::divide_with_stats(kernel_dtype(piece.values.scalar_type()), piece.values.mutable_data_ptr(), n, divisor,
                               partials.data());
    for (double partial : partials) total += partial;
    gradient = piece.gradient.scalar_type() == parameter.scalar_type() ? piece.gradient
                                                                       : piece.gradient.to(parameter.scalar_type());
    pieces.push_back(std::move(piece));
  }
  sums.grad_norm = std::sqrt(total);
  sums.finite = std::isfinite(total);
  if (!sums.finite) sums.finite = all_finite(tail);
  if (!sums.finite || !options_.clip_norm) return;
  const double factor = *options_.clip_norm / (sums.grad_norm + 1e-6);  // as torch.nn.utils.clip_grad_norm_
  if (factor >= 1) return;
  size_t next = 0;
  for (size_t p = 0; p < trainable_.size(); ++p) {
    const auto& parameter = engine.parameters()[p].tensor;
    auto& gradient = parameter.mutable_grad();
    if (!gradient.defined()) continue;
    const auto& piece = pieces[next++];
    kernels::scale(kernel_dtype(piece.values.scalar_type()), piece.values.mutable_data_ptr(),
                   static_cast<size_t>(piece.values.numel()), factor);
    if (piece.gradient.scalar_type() != parameter.scalar_type()) {
      gradient = piece.gradient.to(parameter.scalar_type());
    }
  }
}

void GradientSet::merge_buffers(const Tail& tail) {
  const double divisor = options_.buffers == Buffers::chief ? 1.0 : tail[Tail::weight];
  double* next_floating = tail.buffers();
  int64_t offset = 0;
  for (size_t b = 0; b < registry_.buffers(0).size(); ++b) {
    const auto& buffer = registry_.buffers(0)[b];
    at::Tensor merged;
    if (is_floating(buffer)) {
      merged = at::from_blob(next_floating, buffer.sizes(), at::kDouble).div_(divisor);
      next_floating += buffer.numel();
    } else {
      merged = windows_.front().integer_buffers.narrow(0, offset, buffer.numel()).view(buffer.sizes());
      offset += buffer.numel();
    }
    // A buffer that nobody wrote keeps its bits, which the mean of equal values may not.
    if (tail.written()[b] == 0) continue;
    for (size_t r = 0; r < windows_.size(); ++r) registry_.buffers(r)[b].copy_(merged);
  }
  note_buffers();
}

void GradientSet::note_buffers() {
  noted_buffers_.resize(windows_.size());
  for (size_t r = 0; r < windows_.size(); ++r) {
    const auto& buffers = registry_.buffers(r);
    noted_buffers_[r].resize(buffers.size());
    for (size_t b = 0; b < buffers.size(); ++b) {
      if (noted_buffers_[r][b].buffer.defined() && !was_written(r, b)) continue;
      noted_buffers_[r][b] = {buffers[b], buffers[b]._version(), buffers[b].detach().clone()};
    }
  }
}

bool GradientSet::was_written(size_t local_replica, size_t buffer) const {
  const auto& noted = noted_buffers_[local_replica][buffer];
  const auto& current = registry_.buffers(local_replica)[buffer];
  return !noted.buffer.is_same(current) || current._version() != noted.version || !noted.values.equal(current);
}

WindowSums GradientSet::finish_window(bool fused) {
  const at::NoGradGuard no_grad;
  scalars_.unit = windows_.front().unit;
  const auto tail = tail_of(windows_.front().tail);
  WindowSums sums;
  sums.stop_requested = tail[Tail::stops] > 0;
  if (tail[Tail::failures] > 0) {
    const auto& texts = windows_.front().failures;
    for (size_t replica = 0; replica < texts.size(); ++replica) {
      if (texts[replica].empty()) continue;
      const auto end = texts[replica].find('\n');
      sums.failures.push_back({worker_of(static_cast<int>(replica)),
                               static_cast<int>(replica),
                               {.type = texts[replica].substr(0, end), .text = texts[replica].substr(end + 1)}});
    }
    drop_window();
    return sums;
  }
  sums.weight = tail[Tail::weight];
  if (sums.weight <= 0) {
    sums.dropped = true;
    drop_window();
    return sums;
  }
  const bool is_sum = tail[Tail::sum_losses] > 0;
  if (is_sum && tail[Tail::mean_losses] > 0) {
    drop_window();
    throw InvalidArgument(
        "replicas or micro-batches of one window returned losses of both reductions; return "
        "reduction=\"mean\" or \"sum\" throughout");
  }
  sums.loss = is_sum ? tail[Tail::weighted_loss] : tail[Tail::weighted_loss] / sums.weight;
  collect_metrics(sums);
  for (int replica = 0; replica < topology_.num_replicas && sums.non_finite_at.empty(); ++replica) {
    const auto parameter = static_cast<int>(tail.non_finite(replica)) - 1;
    if (parameter >= 0) {
      sums.non_finite_at = "parameter '" +
                           registry_.name(static_cast<size_t>(trainable_[static_cast<size_t>(parameter)])) +
                           "' of replica " + std::to_string(replica);
    }
  }
  const double divisor = (is_sum ? 1.0 : sums.weight / scalars_.unit) * static_cast<double>(loss_scale_.scale);
  if (fused) {
    take_norm(tail, loss_scale_.scale);
    sums.grad_norm = scalars_.norm;
    sums.finite = scalars_.finite != 0;
  }
  // Of a fused window, somebody may want to look at what was not finite.
  if (!fused || (!sums.finite && options_.keep_gradients)) apply_mean(tail, divisor, sums);
  merge_buffers(tail);
  has_unit_ = true;
  scalars_.unit = kernels::nearest_power_of_two(sums.weight / tail[Tail::contributions]);
  if (loss_scaling_) {
    kernels::loss_scale_update(&loss_scale_, sums.finite, static_cast<float>(loss_scaling_->growth),
                               static_cast<float>(loss_scaling_->backoff), loss_scaling_->interval);
  }
  sums.loss_scale = loss_scale_.scale;
  micro_batches_ = 0;
  return sums;
}

void GradientSet::drop_window() noexcept {
  for (auto& engine : engines_) engine->clear_gradients();
  micro_batches_ = 0;
}

WindowSums GradientSet::local_sums() const {
  WindowSums sums;
  double mean_losses = 0;
  for (const auto& window : windows_) {
    sums.weight += window.weight;
    sums.loss += window.weighted_loss;
    mean_losses += window.mean_losses;
    for (const auto& [name, value] : window.weighted_metrics) sums.metrics[name] += value;
  }
  for (auto& [name, value] : sums.metrics) value /= sums.weight;
  if (mean_losses > 0) sums.loss /= sums.weight;
  return sums;
}

}  // namespace muster
