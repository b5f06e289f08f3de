#include "window/device_numbers.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>

#include "core/plain_memory.h"
#include "device/kernel_dtype.h"
#include "device/kernel_status.h"
#include "kernels/cuda/cuda_kernels.h"
#include "muster/error.h"

namespace muster {

at::Tensor number_on(c10::Device device, const at::Tensor& number) {
  auto value = in_plain_memory(number.detach());
  if (value.device() == device) return value;
  if (value.device().is_cpu()) return at::full({}, value.item(), value.options().device(device));
  return value.to(device, /*non_blocking=*/true);
}

void check_metric(const std::string& name, const at::Tensor& metric) {
  if (name.find('\n') != std::string::npos) {
    throw InvalidArgument("metric '" + name + "' has a line break in its name; names are a line each");
  }
  if (metric.numel() == 1) return;
  throw InvalidArgument("metric '" + name + "' has shape " + c10::str(metric.sizes()) +
                        "; metrics are 0-dim tensors or numbers");
}

at::Tensor DeviceReport::number(size_t index) const {
  return memory.narrow(0, static_cast<int64_t>(index * sizeof(double)), sizeof(double)).view(at::kDouble)[0];
}

at::Tensor DeviceReport::skipped() const {
  return memory.narrow(0, offsetof(kernels::WindowReport, skipped), 1).view(at::kBool)[0];
}

at::Tensor DeviceReport::flags() const { return memory.narrow(0, offsetof(kernels::WindowReport, skipped), 2); }

DeviceScalars::DeviceScalars(c10::Device device, const kernels::LossScaleState& scale)
    : device_(device),
      memory_(at::zeros({kScaleOffset + static_cast<int64_t>(sizeof(kernels::LossScaleState))},
                        at::TensorOptions(at::kByte).device(device))) {
  set_unit(1);
  set_scale(scale);
}

void DeviceScalars::fill(size_t offset, double value) {
  memory_.narrow(0, static_cast<int64_t>(offset), sizeof value).view(at::kDouble).fill_(value);
}

void DeviceScalars::set_unit(double unit) { fill(offsetof(kernels::StepScalars, unit), unit); }

void DeviceScalars::set_divisor(double divisor) { fill(offsetof(kernels::StepScalars, divisor), divisor); }

void DeviceScalars::set_scale(const kernels::LossScaleState& scale) {
  const auto staging = pinned_bytes(sizeof scale, device_);
  std::memcpy(staging.mutable_data_ptr(), &scale, sizeof scale);
  memory_.narrow(0, kScaleOffset, sizeof scale).copy_(staging, /*non_blocking=*/true);
}

at::Tensor DeviceScalars::scale_tensor() const {
  constexpr auto kOffset = static_cast<int64_t>(kScaleOffset + offsetof(kernels::LossScaleState, scale));
  return memory_.narrow(0, kOffset, sizeof(float)).view(at::kFloat)[0].to(at::kDouble);
}

kernels::LossScaleState DeviceScalars::read_scale() const {
  const auto host = memory_.cpu();
  kernels::LossScaleState scale{};
  std::memcpy(&scale, static_cast<const std::byte*>(host.const_data_ptr()) + kScaleOffset, sizeof scale);
  return scale;
}

kernels::StepScalars DeviceScalars::read_scalars() const {
  const auto host = memory_.cpu();
  kernels::StepScalars scalars{};
  std::memcpy(&scalars, host.const_data_ptr(), sizeof scalars);
  return scalars;
}

DeviceNumbers::DeviceNumbers(c10::Device device, std::shared_ptr<DeviceScalars> scalars)
    : device_(device),
      scalars_(std::move(scalars)),
      gate_(at::zeros({1}, at::TensorOptions(at::kDouble).device(device))) {
  with_room(0);
  tail_.zero_();
}

const at::Tensor& DeviceNumbers::with_room(int64_t room) {
  const auto length = static_cast<int64_t>(kernels::tail_size(kSlots));
  const auto bytes = (length + room) * static_cast<int64_t>(sizeof(double));
  const auto before = tail_;
  const auto* const data = memory_.data();
  memory_.reserve(static_cast<size_t>(bytes), device_);
  if (sums_.defined() && memory_.data() == data && sums_.numel() == length + room) return sums_;
  sums_ = memory_.tensor().narrow(0, 0, bytes).view(at::kDouble);
  tail_ = sums_.narrow(0, 0, length);
  if (before.defined() && memory_.data() != data) tail_.copy_(before);
  return sums_;
}

DeviceReport DeviceNumbers::new_report() const {
  return {
      at::empty({static_cast<int64_t>(kernels::report_bytes(kSlots))}, at::TensorOptions(at::kByte).device(device_))};
}

void DeviceNumbers::open() {
  noted_.assign(names_.size(), false);
  new_names_.clear();
}

std::map<std::string, size_t> DeviceNumbers::noted() const {
  std::map<std::string, size_t> slots;
  for (size_t slot = 0; slot < noted_.size(); ++slot) {
    if (noted_[slot]) slots[names_[slot]] = slot;
  }
  for (size_t i = 0; i < new_names_.size(); ++i) slots[new_names_[i]] = names_.size() + i;
  return slots;
}

uint32_t DeviceNumbers::slot_of(const std::string& name) {
  const auto agreed = std::find(names_.begin(), names_.end(), name);
  if (agreed != names_.end()) {
    const auto slot = static_cast<size_t>(agreed - names_.begin());
    noted_[slot] = true;
    return static_cast<uint32_t>(slot);
  }
  const auto found = std::find(new_names_.begin(), new_names_.end(), name);
  const auto slot = names_.size() + static_cast<size_t>(found - new_names_.begin());
  if (slot >= kSlots) {
    throw InvalidArgument("metric '" + name + "' is one too many: on a CUDA device there can be " +
                          std::to_string(kSlots) + " names; put the others into Loss::output");
  }
  if (found == new_names_.end()) new_names_.push_back(name);
  return static_cast<uint32_t>(slot);
}

void DeviceNumbers::launch(const kernels::LossTerms& terms, const at::Tensor& tail, const at::Tensor& gate, void* seed,
                           const DeviceReport& report) const {
  check_kernel(kernels::cuda::note_loss(terms, scalars_->scalars(), scalars_->scale(), tail.mutable_data_ptr<double>(),
                                        gate.mutable_data_ptr<double>(), seed,
                                        static_cast<kernels::WindowReport*>(report.memory.mutable_data_ptr()),
                                        stream_handle(device_)),
               "noting a loss");
}

void DeviceNumbers::add(const kernels::LossTerms& terms, void* seed) {
  report_ = new_report();
  memory_.note_launch(device_);
  launch(terms, tail_, gate_, seed, report_);
}

// As of an absence, which adds nothing.
DeviceReport DeviceNumbers::report_of(const at::Tensor& tail) const {
  kernels::LossTerms terms{};
  terms.num_slots = kSlots;
  auto report = new_report();
  launch(terms, tail, at::empty_like(gate_), nullptr, report);
  return report;
}

at::Tensor DeviceNumbers::tail_by(std::map<std::string, size_t>& slots) const {
  const auto own = noted();
  size_t next = names_.size();
  for (const auto& [name, slot] : slots) next = std::max(next, slot + 1);
  bool is_by_slots = true;
  for (const auto& [name, slot] : own) {
    const bool is_agreed = slot < names_.size();
    // Names without room are refused at the window's end.
    if (!slots.contains(name) && (is_agreed || next < kSlots)) slots[name] = is_agreed ? slot : next++;
    const auto found = slots.find(name);
    is_by_slots = is_by_slots && found != slots.end() && found->second == slot;
  }
  if (is_by_slots) return tail_;
  auto tail = tail_.clone();
  tail.slice(0, static_cast<int64_t>(kernels::metric_field(static_cast<uint32_t>(names_.size())))).zero_();
  for (const auto& [name, slot] : own) {
    const auto found = slots.find(name);
    if (found != slots.end()) metric_sums(tail, found->second).copy_(metric_sums(tail_, slot));
  }
  return tail;
}

at::Tensor DeviceNumbers::note(const Loss& loss, double rows, bool first) {
  const at::NoGradGuard no_grad;
  if (first) open();
  kernels::LossTerms terms{};
  const auto value = in_plain_memory(loss.value.detach());
  terms.loss = value.const_data_ptr();
  terms.loss_dtype = kernel_dtype(loss.value.scalar_type());
  terms.rows = rows;
  at::Tensor weight;
  if (loss.weight && !is_unknown_to_host(*loss.weight)) {
    terms.rows = loss.weight->item<double>();
  } else if (loss.weight) {
    weight = number_on(device_, *loss.weight);
    terms.weight = weight.const_data_ptr();
    terms.weight_dtype = kernel_dtype(weight.scalar_type());
  }
  terms.is_mean = loss.reduction == Reduction::mean;
  terms.first = first;
  terms.num_slots = kSlots;
  std::vector<at::Tensor> metrics;
  for (const auto& [name, metric] : loss.metrics) {
    check_metric(name, metric);
    const uint32_t slot = slot_of(name);
    metrics.push_back(number_on(device_, metric));
    terms.metrics[terms.num_metrics++] = {metrics.back().const_data_ptr(), kernel_dtype(metrics.back().scalar_type()),
                                          slot};
  }
  auto seed = at::empty({}, loss.value.options().requires_grad(false));
  add(terms, seed.mutable_data_ptr());
  return seed;
}

void DeviceNumbers::note_absence(bool first) {
  if (first) open();
  kernels::LossTerms terms{};
  terms.first = first;
  terms.num_slots = kSlots;
  add(terms, nullptr);
}

void DeviceNumbers::agree(const std::vector<std::string>& names) {
  if (names.size() > kSlots) {
    throw InvalidArgument("the replicas have " + std::to_string(names.size()) +
                          " metrics of different names; on a CUDA device there can be " + std::to_string(kSlots));
  }
  const at::NoGradGuard no_grad;
  std::vector<std::string> old_names = names_;
  old_names.insert(old_names.end(), new_names_.begin(), new_names_.end());
  const auto noted = std::move(noted_);
  noted_.assign(names.size(), false);
  const auto old = tail_.clone();
  tail_.slice(0, kernels::kTailFields).zero_();
  for (size_t slot = 0; slot < names.size(); ++slot) {
    const auto found = std::find(old_names.begin(), old_names.end(), names[slot]);
    if (found == old_names.end()) continue;
    const auto from = static_cast<size_t>(found - old_names.begin());
    noted_[slot] = from >= names_.size() || noted[from];
    metric_sums(tail_, slot).copy_(metric_sums(old, from));
  }
  names_ = names;
  new_names_.clear();
}

}  // namespace muster
