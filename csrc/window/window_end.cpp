// The end of a window: sums to norm, step and `.grad`, and buffers.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/view_as_complex.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <utility>

#include "device/kernel_dtype.h"
#include "kernels/step_math.h"
#include "muster/error.h"
#include "optimizer/gradient_norm.h"
#include "optimizer/own_memory.h"
#include "window/gradient_set.h"
#include "window/window_tail.h"

namespace muster {

namespace {

// Up to so many elements are stepped faster by one thread than others are woken.
constexpr int64_t kAloneElements = 1 << 17;

// In place; `partials` becomes those of grad_stats.
void divide(const at::Tensor& values, double divisor, double norm_type, std::vector<double>& partials) {
  const auto n = static_cast<size_t>(values.numel());
  const auto dtype = kernel_dtype(values.scalar_type());
  partials.resize(kernels::num_tiles(n));
  kernels::divide_with_stats(dtype, values.mutable_data_ptr(), n, divisor, partials.data());
  if (norm_type == 2) return;
  const kernels::StatsSegment stats{values.const_data_ptr(), partials.data(), n, dtype};
  kernels::grad_stats(&stats, 1, norm_type);
}

}  // namespace

int GradientSet::worker_of(int replica) const {
  int worker = 0;
  for (int before = topology_.replicas_of_worker.front(); before <= replica;) {
    before += topology_.replicas_of_worker[static_cast<size_t>(++worker)];
  }
  return worker;
}

void GradientSet::collect_metrics(WindowSums& sums) const {
  // Added in replica order: equal on all ranks.
  std::map<std::string, Metric> totals;
  for (const auto& text : windows_.front().metric_texts) {
    std::istringstream lines(text);
    std::string line;
    while (std::getline(lines, line)) {
      char* end = nullptr;
      const double sum = std::strtod(line.c_str(), &end);
      const double weight = std::strtod(end, &end);
      totals[end + 1].add({sum, weight});
    }
  }
  for (const auto& [name, total] : totals) sums.metrics[name] = total.sum / total.weight;
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
    if (!at::isfinite(dense_values(values)).all().item<bool>()) return false;
  }
  return true;
}

std::vector<at::Tensor> GradientSet::used_sums(const Tail& tail) const {
  std::vector<at::Tensor> sums;
  for (size_t p = 0; p < trainable_.size(); ++p) {
    const auto& values = values_of(tail, p);
    if (values.defined()) sums.push_back(values);
  }
  return sums;
}

std::vector<at::Tensor> GradientSet::dense_sums(const Tail& tail) const {
  auto sums = used_sums(tail);
  for (auto& sum : sums) sum = dense_values(sum);
  return sums;
}

kernels::WindowOptions GradientSet::window_options(double loss_scale) const {
  kernels::WindowOptions options{};
  options.clip_norm = options_.clip_norm.value_or(0);
  options.norm_type = options_.clip_norm_type;
  options.clip_value = options_.clip_value.value_or(0);
  options.loss_scale = loss_scale;
  return options;
}

void GradientSet::take_norm(const Tail& tail, double loss_scale) {
  const auto window = window_options(loss_scale);
  if (servers_ && servers_->is_synchronous()) {
    const auto partials = servers_->partials([&](size_t p) { return is_used_on_servers(tail, p); });
    return finish_norm(partials, tail.data(), window, scalars_);
  }
  if (!to_owners_) return muster::take_norm(used_sums(tail), tail.data(), window, scalars_);
  std::vector<double> partials;
  const auto& engine = *engines_.front();
  const auto* const counts = tail.counts();
  for (size_t p = 0; p < trainable_.size(); ++p) {
    if (engine.sparse_sum(p).defined()) {
      append_partials({engine.sparse_sum(p)}, window.norm_type, partials);
    } else if (counts[p] > 0) {
      engine.owners()->append_partials(p, partials);
    }
  }
  finish_norm(partials, tail.data(), window, scalars_);
  if (scalars_.finite != 0) return;
  const auto sums = used_sums(tail);
  // The square of an fp64 value, and high powers.
  const bool may_overflow = window.norm_type > 2 || std::any_of(sums.begin(), sums.end(), [](const auto& sum) {
                              return c10::toRealValueType(sum.scalar_type()) == at::kDouble;
                            });
  if (!may_overflow) {
    // No step follows, and who closes now would take away the statistics that others still read.
    groups_.workers->barrier().wait();
    return;
  }
  const auto finite = at::scalar_tensor(owned_are_finite(tail) ? 1 : 0, at::kInt);
  groups_.workers->all_reduce(finite, ReduceOp::min).wait();
  scalars_.finite = finite.item<int>();
}

bool GradientSet::owned_are_finite(const Tail& tail) const {
  for (size_t p = 0; p < trainable_.size(); ++p) {
    const auto& values = values_of(tail, p);
    if (!values.defined()) continue;
    if (values.is_sparse()) {
      if (!at::isfinite(dense_values(values)).all().item<bool>()) return false;
      continue;
    }
    for (size_t r = 0; r < engines_.size(); ++r) {
      const auto own = elements_of(engines_[r]->slot(p), owned_run(p, r));
      if (!at::isfinite(own).all().item<bool>()) return false;
    }
  }
  return true;
}

// A step makes means only of what it reads: not of other ranks' shards, nor of rows that it reads as a dense copy.
bool GradientSet::keeps_means_first(const Tail& tail) const {
  if (!options_.keep_gradients) return false;
  if (options_.shard_optimizer || divides_steps_) return true;
  for (size_t p = 0; p < trainable_.size(); ++p) {
    if (values_of(tail, p).defined() && values_of(tail, p).is_sparse()) return true;
  }
  return false;
}

at::Tensor GradientSet::grad_norm() const {
  return is_on_device() ? report_.grad_norm() : at::scalar_tensor(scalars_.norm, at::kDouble);
}

std::string GradientSet::step_scalars() const {
  return is_on_device() ? std::string() : std::string(reinterpret_cast<const char*>(&scalars_), sizeof(scalars_));
}

void GradientSet::set_step_scalars(const std::string& scalars) {
  if (!scalars.empty()) std::memcpy(&scalars_, scalars.data(), sizeof(scalars_));
}

uint64_t GradientSet::versions() const {
  uint64_t sum = 0;
  for (const int p : trainable_) sum += registry_.parameter(0, static_cast<size_t>(p))._version();
  return sum;
}

void GradientSet::edit_means(const std::function<void()>& edit) {
  const at::NoGradGuard no_grad;
  auto tail = tail_of(windows_.front().tail);
  if (is_on_device()) enqueue_means(dense_sums(tail), /*clips=*/false);
  std::vector<double> partials;
  for (size_t p = 0; p < trainable_.size(); ++p) {
    const auto& sum = values_of(tail, p);
    if (!sum.defined()) continue;
    if (!is_on_device()) divide(dense_values(sum), scalars_.divisor, options_.clip_norm_type, partials);
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
  // As a sum there is nothing left to divide by.
  if (is_on_device()) {
    const auto numbers = device_windows_.front()->tail().clone();
    numbers.narrow(0, kernels::kSumLosses, 1).fill_(1);
    const auto report = device_windows_.front()->new_report();
    enqueue_norm(tail, numbers, 1, nullptr, report);
    report_.grad_norm().copy_(report.grad_norm());
    return;
  }
  tail.tensor = tail.tensor.clone();
  tail[Tail::sum_losses] = 1;
  take_norm(tail, 1);
}

std::vector<FlatGradient> GradientSet::gradients_of(const Tail& tail, const std::vector<int>& parameters,
                                                    size_t local_replica) const {
  std::vector<FlatGradient> gradients(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const int p = trainable_index_[static_cast<size_t>(parameters[i])];
    if (p < 0) continue;
    const auto& values = values_of(tail, static_cast<size_t>(p));
    if (!values.defined()) continue;
    if (values.is_sparse()) {
      gradients[i].sparse = values;
    } else {
      gradients[i].dense = engines_[local_replica]->slot(static_cast<size_t>(p));
    }
  }
  return gradients;
}

void GradientSet::step(FlatOptimizer& optimizer, const std::vector<int>& parameters, const FlatGroups& groups,
                       const OnReplicas& on_replicas) {
  const at::NoGradGuard no_grad;
  const auto tail = tail_of(windows_.front().tail);
  if (servers_) return step_on_servers(tail, groups);
  auto means = gradients_of(tail, parameters, 0);
  if (divides_steps_) {
    step_divided(optimizer, tail, means, parameters, groups, on_replicas);
  } else {
    const auto* scalars = is_on_device() ? device_windows_.front()->scalars().scalars() : &scalars_;
    optimizer.step(means, groups, scalars, options_.keep_gradients);
    const bool one_each = topology_.num_replicas == topology_.num_workers;
    optimizer.gather_parameters(is_on_device() && one_each ? *groups_.gradients.front() : *groups_.workers);
  }
  for (const int p : parameters) registry_.note_agreed(static_cast<size_t>(p));
  if (!options_.keep_gradients) return;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& mean = means[i].sparse.defined() ? means[i].sparse : means[i].dense;
    if (!mean.defined()) continue;
    const auto& parameter = registry_.parameter(0, static_cast<size_t>(parameters[i]));
    parameter.mutable_grad() = mean.to(parameter.scalar_type());
  }
}

// Peers may be storing what they own into parameters that have a gradient.
void GradientSet::settle(const Tail& tail) {
  std::vector<at::Tensor> trained;
  for (const int p : trainable_) trained.push_back(registry_.parameter(0, static_cast<size_t>(p)));
  if (!home_ || !home_->fits(trained)) {
    auto home = std::make_unique<ParameterHome>(trained, groups_.gradients);
    if (home_) home_->leave();
    home_ = std::move(home);
    return;
  }
  home_->bring_back([&](size_t p) -> std::vector<Run> {
    if (!values_of(tail, p).defined()) return {{0, trained[p].numel()}};
    std::vector<Run> runs;
    for (size_t r = 0; r < engines_.size(); ++r) runs.push_back(owned_run(p, r));
    return runs;
  });
}

const Run& GradientSet::owned_run(size_t parameter, size_t local_replica) const {
  return engines_[local_replica]->owners()->run(parameter, topology_.first_replica + static_cast<int>(local_replica));
}

void GradientSet::step_divided(FlatOptimizer& optimizer, const Tail& tail, const std::vector<FlatGradient>& means,
                               const std::vector<int>& parameters, const FlatGroups& groups,
                               const OnReplicas& on_replicas) {
  const bool crosses_processes = topology_.num_workers > 1;
  DividedStep divided;
  for (size_t r = 0; r < engines_.size(); ++r) {
    StepShare share;
    share.gradients = to_owners_ && r > 0 ? gradients_of(tail, parameters, r) : means;
    for (const int index : parameters) {
      const int p = trainable_index_[static_cast<size_t>(index)];
      share.runs.push_back(p < 0 ? Run{} : owned_run(static_cast<size_t>(p), r));
    }
    divided.shares.push_back(std::move(share));
  }
  if (crosses_processes) {
    settle(tail);
    divided.displacements = home_->displacements();
    divided.allocate_common = [&](int64_t bytes) {
      return groups_.gradients.front()->peer_memory()->allocate_common(bytes);
    };
    divided.note_common = [&](const at::Tensor& state) {
      std::erase_if(common_states_, [](const auto& noted) { return noted.expired(); });
      common_states_.emplace_back(state.getIntrusivePtr());
    };
  }
  const auto is_large = [&] {
    int64_t elements = 0;
    for (const int index : parameters) elements += registry_.parameter(0, static_cast<size_t>(index)).numel();
    return elements > kAloneElements;
  };
  if (crosses_processes || is_large()) {
    divided.for_each = [&](const std::function<void(size_t)>& work) {
      on_replicas([&](int local_replica) {
        const auto r = static_cast<size_t>(local_replica);
        if (!crosses_processes) return work(r);
        auto& memory = *groups_.gradients[r]->peer_memory();
        memory.begin_stores();
        work(r);
        groups_.gradients[r]->barrier().wait();
        memory.end_stores();
      });
    };
  }
  optimizer.step_divided(divided, groups, &scalars_, /*keep=*/false);
}

void GradientSet::leave_memory() {
  if (home_) home_->leave();
  for (const auto& noted : std::exchange(common_states_, {})) {
    if (auto state = noted.lock()) give_own_memory(at::Tensor(std::move(state)));
  }
}

// The window is dropped where something differs.
void GradientSet::check_agreement(const Tail& tail) {
  if (!agreement_) return;
  const bool differs = std::any_of(&tail.digest(0), &tail.digest(0) + topology_.num_replicas,
                                   [&](double digest) { return digest != tail.digest(0); });
  if (!differs && tail.writes() == 0) return;
  try {
    if (differs) agreement_->throw_difference(*groups_.workers);
    for (const int p : agreement_->compare_values(*groups_.workers)) registry_.note_agreed(static_cast<size_t>(p));
  } catch (const LayoutMismatch&) {
    drop_window();
    end_unchanged();
    throw;
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
  const double norm_type = options_.clip_norm_type;
  double total = 0;
  for (size_t p = 0; p < trainable_.size(); ++p) {
    const auto& parameter = engine.parameters()[p].tensor;
    auto& gradient = parameter.mutable_grad();
    gradient.reset();
    const auto& sum = values_of(tail, p);
    if (!sum.defined()) continue;
    Piece piece{dense_values(sum), sum};
    divide(piece.values, divisor, norm_type, partials);
    for (double partial : partials) total = kernels::join_partials(total, partial, norm_type);
    gradient = piece.gradient.scalar_type() == parameter.scalar_type() ? piece.gradient
                                                                       : piece.gradient.to(parameter.scalar_type());
    pieces.push_back(std::move(piece));
  }
  sums.grad_norm = kernels::norm_root(total, norm_type);
  sums.finite = std::isfinite(total);
  if (!sums.finite) sums.finite = all_finite(tail);
  if (!sums.finite) return;
  kernels::StepScalars clipping{};
  clipping.divisor = 1;
  clipping.finite = 1;
  clipping.clip = kernels::norm_clip(sums.grad_norm, options_.clip_norm.value_or(0));
  clipping.clip_value = options_.clip_value.value_or(0);
  if (clipping.clip == 1 && clipping.clip_value == 0) return;
  size_t next = 0;
  for (size_t p = 0; p < trainable_.size(); ++p) {
    const auto& parameter = engine.parameters()[p].tensor;
    auto& gradient = parameter.mutable_grad();
    if (!gradient.defined()) continue;
    const auto& piece = pieces[next++];
    kernels::MeanSegment segment{};
    segment.values = piece.values.mutable_data_ptr();
    segment.n = static_cast<size_t>(piece.values.numel());
    segment.dtype = kernel_dtype(piece.values.scalar_type());
    kernels::apply_means(&segment, 1, &clipping, /*clips=*/true);
    if (piece.gradient.scalar_type() != parameter.scalar_type()) {
      gradient = piece.gradient.to(parameter.scalar_type());
    }
  }
}

void GradientSet::merge_buffers(const Tail& tail) {
  const double divisor = options_.buffers == Buffers::chief ? 1.0 : tail[Tail::weight];
  double* next_mean = tail.extra();
  int64_t offset = 0;
  for (size_t b = 0; b < registry_.buffers(0).size(); ++b) {
    const auto& buffer = registry_.buffers(0)[b];
    at::Tensor merged;
    if (is_averaged(buffer)) {
      merged = doubles_like(buffer, next_mean).div_(divisor);
      // In memory of its own, which is aligned for complex numbers.
      if (buffer.is_complex()) merged = at::view_as_complex(merged.clone());
      next_mean += num_doubles(buffer);
    } else {
      merged = windows_.front().integer_buffers.narrow(0, offset, buffer.numel()).view(buffer.sizes());
      offset += buffer.numel();
    }
    // A buffer that nobody wrote keeps its bits, which the mean of equal values may not.
    if (tail.written()[b] == 0 && !adopts_) continue;
    for (size_t r = 0; r < windows_.size(); ++r) registry_.buffers(r)[b].copy_(merged);
  }
  if (adopts_) is_fresh_ = false;
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
  hooked_ = tail[Tail::hooks] > 0;
  has_failed_ = tail[Tail::failures] > 0;
  if (has_failed_) {
    const auto& texts = windows_.front().failures;
    for (size_t replica = 0; replica < texts.size(); ++replica) {
      if (texts[replica].empty()) continue;
      const auto end = texts[replica].find('\n');
      sums.failures.push_back({worker_of(static_cast<int>(replica)),
                               static_cast<int>(replica),
                               {.type = texts[replica].substr(0, end), .text = texts[replica].substr(end + 1)}});
    }
    drop_window();
    end_unchanged();
    return sums;
  }
  sums.weight = tail[Tail::weight];
  if (sums.weight <= 0) {
    sums.dropped = true;
    drop_window();
    end_unchanged();
    return sums;
  }
  const bool is_sum = tail[Tail::sum_losses] > 0;
  if (is_sum && tail[Tail::mean_losses] > 0) {
    drop_window();
    end_unchanged();
    throw InvalidArgument(
        "replicas or micro-batches of one window returned losses of both reductions; return "
        "reduction=\"mean\" or \"sum\" throughout");
  }
  if (servers_) check_dense(tail);
  check_agreement(tail);
  for (int replica = 0; replica < topology_.num_replicas && sums.non_finite_at.empty(); ++replica) {
    const auto parameter = static_cast<int>(tail.non_finite(replica)) - 1;
    if (parameter >= 0) {
      sums.non_finite_at = "parameter '" +
                           registry_.name(static_cast<size_t>(trainable_[static_cast<size_t>(parameter)])) +
                           "' of replica " + std::to_string(replica);
    }
  }
  micro_batches_ = 0;
  has_unit_ = true;
  if (is_on_device()) {
    finish_on_device(tail, fused, sums);
    return sums;
  }
  sums.loss = is_sum ? tail[Tail::weighted_loss] : tail[Tail::weighted_loss] / sums.weight;
  collect_metrics(sums);
  const double divisor = (is_sum ? 1.0 : sums.weight / scalars_.unit) * static_cast<double>(loss_scale_.scale);
  if (fused) {
    take_norm(tail, loss_scale_.scale);
    sums.grad_norm = scalars_.norm;
    sums.finite = scalars_.finite != 0;
    if (!sums.finite) end_unchanged();
    if (sums.finite && keeps_means_first(tail)) {
      std::vector<double> partials;
      for (const auto& values : dense_sums(tail)) divide(values, scalars_.divisor, options_.clip_norm_type, partials);
      scalars_.divisor = 1;
    }
  }
  // Of a fused window, somebody may want to look at what was not finite.
  if (!fused || (!sums.finite && options_.keep_gradients)) apply_mean(tail, divisor, sums);
  merge_buffers(tail);
  scalars_.unit = kernels::next_unit(scalars_.unit, sums.weight / tail[Tail::contributions]);
  if (loss_scaling_) {
    kernels::loss_scale_update(&loss_scale_, sums.finite, loss_scaling_->growth, loss_scaling_->backoff,
                               loss_scaling_->interval);
  }
  return sums;
}

void GradientSet::drop_window() noexcept {
  for (auto& engine : engines_) engine->clear_gradients();
  micro_batches_ = 0;
}

WindowSums GradientSet::local_sums() const {
  WindowSums sums;
  if (is_on_device()) {
    sums.on_device = result_so_far();
    return sums;
  }
  double mean_losses = 0;
  std::map<std::string, Metric> metrics;
  for (const auto& window : windows_) {
    sums.weight += window.weight;
    sums.loss += window.weighted_loss;
    mean_losses += window.mean_losses;
    for (const auto& [name, metric] : window.metrics) metrics[name].add(metric);
  }
  for (const auto& [name, metric] : metrics) sums.metrics[name] = metric.sum / metric.weight;
  if (mean_losses > 0) sums.loss /= sums.weight;
  return sums;
}

}  // namespace muster
