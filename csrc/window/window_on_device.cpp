// A window where replicas work on streams: what replicas tell each other goes through the control group, numbers stay
// on the device.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "comm/text_exchange.h"
#include "device/kernel_dtype.h"
#include "device/kernel_status.h"
#include "kernels/cuda/cuda_kernels.h"
#include "window/gradient_set.h"
#include "window/window_tail.h"

namespace muster {

namespace {

std::vector<std::string> lines_of(const std::vector<std::string>& texts) {
  std::set<std::string> lines;
  for (const auto& text : texts) {
    std::istringstream in(text);
    std::string line;
    while (std::getline(in, line)) lines.insert(line);
  }
  return {lines.begin(), lines.end()};
}

StepResult result_of(const DeviceReport& report, const std::map<std::string, size_t>& metrics) {
  StepResult result;
  result.loss = report.loss();
  result.weight = report.weight();
  result.skipped = report.skipped();
  result.loss_scale = report.loss_scale();
  for (const auto& [name, slot] : metrics) result.metrics[name] = report.metric(slot);
  return result;
}

}  // namespace

void GradientSet::close_on_device(size_t r, const Tail& tail, const Failure& failure) {
  const at::NoGradGuard no_grad;
  auto& window = windows_[r];
  auto& device_window = *device_windows_[r];
  auto& replicas = *groups_.gradients[r];
  auto& control = *groups_.control_of(r);
  tail[Tail::weight] = tail[Tail::contributions];
  const auto noted = device_window.noted();
  device_buffers_[r].add_written(registry_.buffers(r), tail.written());
  if (!failure) {
    tail[Tail::metrics] = device_window.has_new_names() ? 1 : 0;
    const auto& names = device_window.names();
    for (size_t slot = 0; slot < names.size(); ++slot) tail.extra()[slot] = noted.contains(names[slot]) ? 1 : 0;
  }
  control.all_reduce(tail.tensor, ReduceOp::sum, static_cast<uint64_t>(tail.tensor.numel())).wait();
  window.tail = tail.tensor;
  if (tail[Tail::failures] > 0) {
    engines_[r]->wait();
    window.failures = exchange_texts(control, failure ? failure.type + '\n' + failure.text : std::string());
    return;
  }
  window.noted_metrics.clear();
  if (tail[Tail::metrics] > 0) {
    std::string text;
    for (const auto& [name, slot] : noted) text += name + '\n';
    window.noted_metrics = lines_of(exchange_texts(control, text));
    std::set<std::string> names(window.noted_metrics.begin(), window.noted_metrics.end());
    names.insert(device_window.names().begin(), device_window.names().end());
    device_window.agree({names.begin(), names.end()});
  } else {
    const auto& names = device_window.names();
    for (size_t slot = 0; slot < names.size(); ++slot) {
      if (tail.extra()[slot] > 0) window.noted_metrics.push_back(names[slot]);
    }
  }
  const auto& buffers = registry_.buffers(r);
  if (topology_.num_replicas > 1 && !buffers.empty()) {
    const auto own_weight = device_window.tail().select(0, kernels::kWeight).clone();
    device_buffers_[r].reduce(replicas, buffers, tail.written(), own_weight, options_.buffers);
  }
  auto tail_work = replicas.all_reduce(device_window.tail(), ReduceOp::sum);
  engines_[r]->wait();
  device_buffers_[r].wait();
  tail_work.wait();
}

void GradientSet::enqueue_norm(const Tail& tail, const at::Tensor& numbers, double loss_scale,
                               kernels::LossScaleState* scale, const DeviceReport& report) {
  auto options = window_options(loss_scale);
  if (loss_scaling_) {
    options.growth = loss_scaling_->growth;
    options.backoff = loss_scaling_->backoff;
    options.interval = loss_scaling_->interval;
  }
  const auto& first = *device_windows_.front();
  device_norm_.enqueue(dense_sums(tail), first.device(), options,
                       {numbers.const_data_ptr<double>(), first.scalars().scalars(), scale,
                        static_cast<kernels::WindowReport*>(report.memory.mutable_data_ptr()), DeviceWindow::kSlots});
}

void GradientSet::enqueue_means(const std::vector<at::Tensor>& sums, bool clips) {
  std::vector<kernels::MeanSegment> segments;
  for (const auto& values : sums) {
    kernels::MeanSegment segment{};
    segment.values = values.mutable_data_ptr();
    segment.n = static_cast<size_t>(values.numel());
    segment.dtype = kernel_dtype(values.scalar_type());
    segments.push_back(segment);
  }
  const auto& first = *device_windows_.front();
  mean_segments_.follow(segments, first.device());
  check_kernel(kernels::cuda::apply_means(mean_segments_.items(), mean_segments_.chunks(), mean_segments_.num_chunks(),
                                          first.scalars().scalars(), clips, stream_handle(first.device())),
               "dividing gradients");
}

void GradientSet::apply_mean_on_device(const Tail& tail, WindowSums& sums) {
  enqueue_means(dense_sums(tail), /*clips=*/true);
  for (size_t p = 0; p < trainable_.size(); ++p) {
    const auto& parameter = engines_.front()->parameters()[p].tensor;
    const auto& mean = values_of(tail, p);
    parameter.mutable_grad() = mean.defined() ? mean.to(parameter.scalar_type()) : at::Tensor();
  }
  // Optimizers that know no flag must not be called.
  const auto scalars = device_windows_.front()->scalars().read_scalars();
  sums.finite = scalars.finite != 0;
  sums.dropped = scalars.dropped != 0;
}

void GradientSet::finish_on_device(const Tail& tail, bool fused, WindowSums& sums) {
  const auto& first = *device_windows_.front();
  const OnDevice scope(first.device());
  report_ = first.new_report();
  enqueue_norm(tail, first.tail(), loss_scale_.scale, loss_scaling_ ? first.scalars().scale() : nullptr, report_);
  if (fused && keeps_means_first(tail)) {
    enqueue_means(dense_sums(tail), /*clips=*/false);
    device_windows_.front()->shared_scalars()->set_divisor(1);
  }
  if (!fused) apply_mean_on_device(tail, sums);
  for (size_t r = 0; r < device_windows_.size(); ++r) {
    const auto& window = *device_windows_[r];
    const OnDevice of_replica(window.device());
    if (window.device() != first.device()) {
      window.scalars().memory().copy_(first.scalars().memory(), /*non_blocking=*/true);
    }
    if (topology_.num_replicas == 1 || registry_.buffers(r).empty()) continue;
    device_buffers_[r].merge(registry_.buffers(r), window.tail().select(0, kernels::kWeight), options_.buffers);
  }
  const auto& present = windows_.front().noted_metrics;
  std::map<std::string, size_t> metrics;
  for (size_t slot = 0; slot < first.names().size(); ++slot) {
    if (std::find(present.begin(), present.end(), first.names()[slot]) != present.end()) {
      metrics[first.names()[slot]] = slot;
    }
  }
  sums.report = report_;
  sums.on_device = result_of(report_, metrics);
}

StepResult GradientSet::result_so_far() const {
  const auto& first = *device_windows_.front();
  auto result = result_of(first.report(), first.noted());
  if (device_windows_.size() == 1) return result;
  const at::NoGradGuard no_grad;
  const OnDevice scope(first.device());
  // Sums of what each replica has; an empty one has NaN.
  const auto here = [&](const at::Tensor& number) { return number.to(first.device(), /*non_blocking=*/true); };
  const auto times = [](const at::Tensor& mean, const at::Tensor& weight) {
    return at::where(weight.gt(0), mean * weight, at::zeros_like(weight));
  };
  result.weight = at::zeros_like(result.weight);
  result.loss = at::zeros_like(result.loss);
  result.metrics.clear();
  std::map<std::string, at::Tensor> metrics;
  bool is_sum = false;
  for (size_t r = 0; r < device_windows_.size(); ++r) {
    const auto& window = *device_windows_[r];
    const auto weight = here(window.report().weight());
    const auto loss = here(window.report().loss());
    const bool adds = windows_[r].sum_losses > 0;
    is_sum = is_sum || adds;
    result.weight = result.weight + weight;
    result.loss = result.loss + (adds ? at::where(weight.gt(0), loss, at::zeros_like(loss)) : times(loss, weight));
    for (const auto& [name, slot] : window.noted()) {
      auto& sums = metrics[name];
      const auto own = here(metric_sums(window.tail(), slot));
      sums = sums.defined() ? sums + own : own.clone();
    }
  }
  if (!is_sum) result.loss = result.loss / result.weight;
  for (const auto& [name, sums] : metrics) result.metrics[name] = sums.select(0, 0) / sums.select(0, 1);
  return result;
}

}  // namespace muster
