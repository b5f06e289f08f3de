#include "window/device_window.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <exception>
#include <set>
#include <string>
#include <utility>

#include "comm/text_exchange.h"
#include "core/lines.h"
#include "core/log.h"
#include "device/device.h"
#include "device/kernel_dtype.h"
#include "device/kernel_status.h"
#include "gradient/gradient_dtype.h"
#include "kernels/cuda/cuda_kernels.h"
#include "window/buffer_sizes.h"
#include "window/host_norm.h"

namespace muster {

namespace {

std::vector<std::string> distinct_lines(const std::vector<std::string>& texts) {
  std::set<std::string> lines;
  for (const auto& text : texts) {
    for (auto& line : lines_of(text)) lines.insert(std::move(line));
  }
  return {lines.begin(), lines.end()};
}

bool has_rows(const at::Tensor& sum) { return sum.defined() && sum.is_sparse(); }

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

void DeviceScale::set(const kernels::LossScaleState& state) {
  WindowScale::set(state);
  for (const auto& scalars : of_devices_) {
    const OnDevice scope(scalars->device());
    scalars->set_scale(state);
  }
}

std::optional<double> DeviceScale::unit() const {
  if (!has_unit_) return std::nullopt;
  return of_devices_.front()->read_scalars().unit;
}

void DeviceScale::set_unit(double unit) {
  for (const auto& scalars : of_devices_) {
    const OnDevice scope(scalars->device());
    scalars->set_unit(unit);
  }
  note_unit();
}

DeviceWindow::DeviceWindow(const WindowContext& context) : context_(context), scale_(context.options, scalars_) {
  const auto& devices = context.topology.devices;
  if (devices_divide(context.topology, context.options)) shares_.emplace(context);
  for (size_t r = 0; r < devices.size(); ++r) {
    const auto device = devices[r];
    // Replicas on one device share what kernels read there.
    const auto is_here = [&](c10::Device other) { return share_memory(other, device); };
    const auto beside = static_cast<size_t>(std::find_if(devices.begin(), devices.end(), is_here) - devices.begin());
    const OnDevice scope(device);
    scalars_.push_back(beside < r ? scalars_[beside] : std::make_shared<DeviceScalars>(device, scale_.on_host()));
    auto& replica = replicas_.emplace_back();
    replica.numbers = std::make_unique<DeviceNumbers>(device, scalars_.back());
    replica.made_on = current_streams({device}).front();
  }
}

// Steps may have been taken on another stream than the one on which memory was allocated, which gives that memory to
// others as soon as it is free here: they wait for the last step.
DeviceWindow::~DeviceWindow() {
  try {
    for (const auto& replica : replicas_) {
      if (replica.made_on && replica.last) order_streams(*replica.last, *replica.made_on);
    }
  } catch (const std::exception& error) {
    log(LogLevel::warning, std::string("a device did not take the end of a strategy: ") + error.what());
  }
}

void DeviceWindow::open() {
  const at::NoGradGuard no_grad;
  for (size_t r = 0; r < replicas_.size(); ++r) {
    auto& replica = replicas_[r];
    replica.losses = {};
    replica.noted_metrics.clear();
    if (context_.topology.num_replicas == 1) continue;
    const OnDevice scope(replica.numbers->device());
    replica.buffers.open(context_.registry.buffers(r));
  }
}

void DeviceWindow::weigh(int local_replica, double rows) {
  if (scale_.has_unit()) return;
  const auto r = static_cast<size_t>(local_replica);
  if (const auto unit = guess_unit(*context_.groups.control_of(r), rows)) scalars_[r]->set_unit(*unit);
}

NotedPart DeviceWindow::note(const ReplicaPart& part) {
  auto& replica = replicas_[static_cast<size_t>(part.local_replica)];
  auto& numbers = *replica.numbers;
  if (part.loss == nullptr) {
    numbers.note_absence(part.is_first);
    return {.seed = {}, .contributes = false, .factor = 1, .gate = numbers.gate()};
  }
  const auto& loss = *part.loss;
  // A weight that only kernels look at may be 0: the gate knows.
  const bool is_known = !loss.weight || !numbers.is_unknown_to_host(*loss.weight);
  const bool contributes = !is_known || weight_on_host(part) > 0;
  auto seed = numbers.note(loss, part.rows, part.is_first);
  if (part.crosses) {
    const at::NoGradGuard no_grad;
    const auto share =
        at::from_blob(const_cast<double*>(numbers.gate()), {}, at::TensorOptions(at::kDouble).device(numbers.device()));
    seed = (seed.to(at::kDouble) * share).to(seed.scalar_type());
    share.fill_(1);  // also of a part without weight: others' gradients come through it
  }
  if (contributes) replica.losses.add(loss.reduction);
  return {.seed = seed, .contributes = contributes || part.crosses, .factor = 1, .gate = numbers.gate()};
}

ClosedWindow DeviceWindow::close(int local_replica, const Closing& closing) {
  const at::NoGradGuard no_grad;
  const auto r = static_cast<size_t>(local_replica);
  auto& replica = replicas_[r];
  auto& numbers = *replica.numbers;
  replica.last = current_streams({numbers.device()}).front();
  auto& engine = context_.sums.engine(r);
  auto& replicas = *context_.groups.gradients[r];
  auto& control = *context_.groups.control_of(r);
  const auto& buffers = context_.registry.buffers(r);
  const auto tail =
      new_tail(context_, local_replica, closing, replica.losses, static_cast<int64_t>(numbers.names().size()));
  tail[Tail::weight] = tail[Tail::contributions];
  const auto noted = numbers.noted();
  replica.buffers.add_written(buffers, tail.written());
  tail.sizes(context_.topology.first_replica + local_replica) = digest_of_sizes(buffers);
  if (!closing.failure) {
    tail[Tail::metrics] = numbers.has_new_names() ? 1 : 0;
    const auto& names = numbers.names();
    for (size_t slot = 0; slot < names.size(); ++slot) tail.extra()[slot] = noted.contains(names[slot]) ? 1 : 0;
  }
  control.all_reduce(tail.tensor, ReduceOp::sum, static_cast<uint64_t>(tail.tensor.numel())).wait();
  if (tail[Tail::failures] > 0) {
    engine.wait();
    return {tail, exchange_texts(control, text_of(closing.failure))};
  }
  const double* const sizes = &tail.sizes(0);
  if (std::any_of(sizes, sizes + tail.replicas, [&](double digest) { return digest != *sizes; })) {
    throw_sizes_differ(context_.registry, r, "the replicas' buffers differ in size");
  }
  agree_on_metrics(replica, tail, control);
  // The numbers of both travel together: what a collective costs is its latency.
  const bool merges = context_.topology.num_replicas > 1;
  const auto& sums =
      numbers.with_room(merges ? replica.buffers.begin(buffers, tail.written(), context_.topology.num_replicas) : 0);
  if (merges) replica.buffers.gather(replicas, numbers.room(), numbers.weight(), context_.options.buffers);
  auto tail_work = replicas.all_reduce(sums, ReduceOp::sum);
  engine.wait();
  replica.buffers.wait();
  tail_work.wait();
  engine.reduce_sparse(tail.counts());
  if (tail[Tail::weight] > 0) engine.learn_order(tail.counts());
  return {tail, {}};
}

// Collective over replicas only where one of them noted a metric that not all know.
void DeviceWindow::agree_on_metrics(Replica& replica, const Tail& tail, comm::Communicator& control) {
  auto& numbers = *replica.numbers;
  replica.noted_metrics.clear();
  if (tail[Tail::metrics] > 0) {
    std::string text;
    for (const auto& [name, slot] : numbers.noted()) text += name + '\n';
    replica.noted_metrics = distinct_lines(exchange_texts(control, text));
    std::set<std::string> names(replica.noted_metrics.begin(), replica.noted_metrics.end());
    names.insert(numbers.names().begin(), numbers.names().end());
    numbers.agree({names.begin(), names.end()});
    return;
  }
  const auto& names = numbers.names();
  for (size_t slot = 0; slot < names.size(); ++slot) {
    if (tail.extra()[slot] > 0) replica.noted_metrics.push_back(names[slot]);
  }
}

void DeviceWindow::enqueue_norm(const Tail& tail, const at::Tensor& numbers, double loss_scale,
                                kernels::LossScaleState* scale, const DeviceReport& report) {
  auto options = window_options(context_.options, loss_scale);
  if (const auto& rule = scale_.rule()) {
    options.growth = rule->growth;
    options.backoff = rule->backoff;
    options.interval = rule->interval;
  }
  const DeviceNorm::Window window{numbers.const_data_ptr<double>(), scalars_.front()->scalars(), scale,
                                  static_cast<kernels::WindowReport*>(report.memory.mutable_data_ptr()),
                                  DeviceNumbers::kSlots};
  const auto& sums = context_.sums;
  if (sums.division().receivers && context_.topology.num_workers > 1) {
    return norm_.enqueue(parts(tail), context_.groups.gradients, options, window);
  }
  if (sums.division().devices) return norm_.enqueue(parts(tail), options, window);
  norm_.enqueue(sums.dense(tail), replicas_.front().numbers->device(), options, window);
}

// What counts of the window's sums on each device, where their steps are divided.
std::vector<DeviceNorm::Part> DeviceWindow::parts(const Tail& tail) const {
  const auto& [receivers, own] = context_.sums.division();
  const auto& topology = context_.topology;
  const bool over_workers = receivers && topology.num_workers > 1;
  const auto& shards = over_workers ? *receivers : *own;
  std::vector<DeviceNorm::Part> parts;
  for (size_t r = 0; r < topology.devices.size(); ++r) {
    const size_t rank = over_workers ? static_cast<size_t>(topology.first_replica) + r : r;
    const auto& shard = shards.at(rank);
    parts.push_back({topology.devices[r], context_.sums.dense(tail, r), context_.sums.runs_in(shard, tail, rank == 0)});
  }
  return parts;
}

void DeviceWindow::enqueue_means(const Tail& tail, bool clips) {
  std::vector<kernels::MeanSegment> segments;
  for (const auto& values : context_.sums.dense(tail)) {
    kernels::MeanSegment segment{};
    segment.values = values.mutable_data_ptr();
    segment.n = static_cast<size_t>(values.numel());
    segment.dtype = kernel_dtype(values.scalar_type());
    segments.push_back(segment);
  }
  const auto device = replicas_.front().numbers->device();
  mean_segments_.follow(segments, device);
  check_kernel(kernels::cuda::apply_means(mean_segments_.items(), mean_segments_.chunks(), mean_segments_.num_chunks(),
                                          scalars_.front()->scalars(), clips, stream_handle(device)),
               "dividing gradients");
}

void DeviceWindow::leave_clipped_means(const Tail& tail, WindowSums& sums) {
  enqueue_means(tail, /*clips=*/true);
  const auto& parameters = context_.sums.engine(0).parameters();
  for (size_t p = 0; p < parameters.size(); ++p) {
    const auto& parameter = parameters[p].tensor;
    const auto& mean = context_.sums.sum_of(tail, p);
    parameter.mutable_grad() = mean.defined() ? mean.to(gradient_dtype(parameter)) : at::Tensor();
  }
  // Optimizers that know no flag must not be called.
  const auto scalars = scalars_.front()->read_scalars();
  sums.finite = scalars.finite != 0;
  sums.dropped = scalars.dropped != 0;
}

void DeviceWindow::finish(const Tail& tail, bool fused, WindowSums& sums) {
  if (sums.ends_unchanged()) return;
  scale_.note_unit();
  is_mended_ = false;
  const auto& options = context_.options;
  const auto& first = *replicas_.front().numbers;
  const OnDevice scope(first.device());
  report_ = first.new_report();
  enqueue_norm(tail, first.tail(), scale_.on_host().scale, scale_.rule() ? scalars_.front()->scale() : nullptr,
               report_);
  // A step makes means only of what it reads: not of other ranks' shards, nor of rows that it reads as a dense copy.
  if (fused && options.keep_gradients && (options.shard_optimizer || context_.sums.has_sparse(tail))) {
    enqueue_means(tail, /*clips=*/false);
    scalars_.front()->set_divisor(1);
  }
  if (!fused) leave_clipped_means(tail, sums);
  for (size_t r = 0; r < replicas_.size(); ++r) {
    const auto& numbers = *replicas_[r].numbers;
    const OnDevice of_replica(numbers.device());
    if (scalars_[r] != scalars_.front()) {
      scalars_[r]->memory().copy_(scalars_.front()->memory(), /*non_blocking=*/true);
    }
    if (context_.topology.num_replicas == 1) continue;
    replicas_[r].buffers.merge(context_.registry.buffers(r), numbers.room(), numbers.weight(), options.buffers);
  }
  const auto& present = replicas_.front().noted_metrics;
  std::map<std::string, size_t> metrics;
  for (size_t slot = 0; slot < first.names().size(); ++slot) {
    if (std::find(present.begin(), present.end(), first.names()[slot]) != present.end()) {
      metrics[first.names()[slot]] = slot;
    }
  }
  sums.report = report_;
  sums.on_device = result_of(report_, metrics);
}

kernels::StepScalars* DeviceWindow::leave_means(const Tail& tail, const std::function<void()>& edit) {
  const at::NoGradGuard no_grad;
  enqueue_means(tail, /*clips=*/false);
  context_.sums.edit(tail, edit);
  // A window of sums has nothing left to divide by.
  const auto& first = *replicas_.front().numbers;
  const OnDevice scope(first.device());  // whatever the edit left
  const auto numbers = first.tail().clone();
  numbers.narrow(0, kernels::kSumLosses, 1).fill_(1);
  const auto report = first.new_report();
  enqueue_norm(tail, numbers, 1, nullptr, report);
  report_.grad_norm().copy_(report.grad_norm());
  return nullptr;
}

void DeviceWindow::update(const Tail& tail, FlatOptimizer& optimizer, const std::vector<int>& parameters,
                          const FlatGroups& groups, const OnReplicas& /*on_replicas*/) {
  optimizer.follow_shapes();
  if (!step_in_shares(tail, optimizer, parameters, groups)) step_whole(tail, optimizer, parameters, groups);
  gather(tail, optimizer, parameters);
  for (const int p : parameters) context_.registry.note_agreed(static_cast<size_t>(p));
}

void DeviceWindow::step_whole(const Tail& tail, FlatOptimizer& optimizer, const std::vector<int>& parameters,
                              const FlatGroups& groups) {
  const auto means = context_.sums.gradients_of(tail, parameters, 0);
  optimizer.step(means, groups, scalars_.front()->scalars(), context_.options.keep_gradients);
  if (context_.options.keep_gradients) context_.sums.show(means, parameters);
}

// False where the first device is to step.
bool DeviceWindow::step_in_shares(const Tail& tail, FlatOptimizer& optimizer, const std::vector<int>& parameters,
                                  const FlatGroups& groups) {
  if (!shares_ || !context_.sums.division().devices) return false;
  if (!std::exchange(is_mended_, true) && !shares_->mend()) {
    context_.sums.set_division({context_.sums.division().receivers, nullptr});
    return false;
  }
  std::vector<const kernels::StepScalars*> scalars;
  for (const auto& of_replica : scalars_) scalars.push_back(of_replica->scalars());
  shares_->step(optimizer, tail, parameters, groups, scalars);
  return true;
}

// Collective over replicas where workers have shards of the optimizer's state: all get what others stepped.
void DeviceWindow::gather(const Tail& tail, FlatOptimizer& optimizer, const std::vector<int>& parameters) const {
  if (optimizer.shard().size == 1) return;
  const auto& topology = context_.topology;
  auto& registry = context_.registry;
  if (topology.access == DeviceAccess::common) return optimizer.gather_parameters(*context_.groups.workers);
  const auto& division = context_.sums.division();
  // Where this process's devices were to divide the step and did not, all have what the first one stepped.
  const bool has_first_ones = division.receivers && !division.devices;
  std::vector<std::vector<at::Tensor>> copies(replicas_.size());
  std::vector<int> received;
  for (const int index : parameters) {
    const auto p = static_cast<size_t>(index);
    const auto& first = registry.parameter(0, p);
    copies.front().push_back(first);
    const bool is_received = !has_first_ones && registry.are_alike(p);
    if (is_received) received.push_back(index);
    for (size_t r = 1; r < replicas_.size(); ++r) {
      copies[r].push_back(is_received ? registry.parameter(r, p)
                                      : first.detach().to(topology.devices[r], /*non_blocking=*/true, /*copy=*/true));
      copies[r].back().unsafeGetTensorImpl()->bump_version();
    }
  }
  optimizer.broadcast_parameters(copies, stepped_runs(tail, optimizer, parameters), context_.groups.gradients);
  if (replicas_.size() > 1 && topology.access == DeviceAccess::peer) registry.note_copied(received);
}

// What each replica of the job stepped: a worker's first one all of its shard of what is not divided, and of rows.
std::vector<std::vector<Run>> DeviceWindow::stepped_runs(const Tail& tail, const FlatOptimizer& optimizer,
                                                         const std::vector<int>& parameters) const {
  const auto& topology = context_.topology;
  const auto& receivers = context_.sums.division().receivers;
  const auto by_worker = optimizer.state().runs_for(undivided(topology.num_workers));
  std::vector<std::vector<Run>> runs(static_cast<size_t>(topology.num_replicas), std::vector<Run>(parameters.size()));
  for (size_t i = 0; i < parameters.size(); ++i) {
    const int index = context_.sums.index_of(parameters[i]);
    const auto p = static_cast<size_t>(index);
    const bool is_divided = receivers && index >= 0 && !has_rows(context_.sums.sum_of(tail, p));
    for (size_t replica = 0; is_divided && replica < runs.size(); ++replica)
      runs[replica][i] = (*receivers)[replica][p];
    for (int worker = 0; !is_divided && worker < topology.num_workers; ++worker) {
      runs[static_cast<size_t>(topology.first_replica_of(worker))][i] = by_worker[static_cast<size_t>(worker)][i];
    }
  }
  return runs;
}

WindowSums DeviceWindow::so_far() const {
  WindowSums sums;
  sums.on_device = sums_so_far();
  return sums;
}

StepResult DeviceWindow::sums_so_far() const {
  const auto& first = *replicas_.front().numbers;
  auto slots = first.noted();
  if (replicas_.size() == 1) return result_of(first.report(), slots);
  const at::NoGradGuard no_grad;
  const OnDevice scope(first.device());
  auto sums = first.tail();
  for (size_t r = 1; r < replicas_.size(); ++r) {
    sums = sums + replicas_[r].numbers->tail_by(slots).to(first.device(), /*non_blocking=*/true);
  }
  return result_of(first.report_of(sums), slots);
}

}  // namespace muster
