// Losses and metrics of one replica's window where replicas work on streams: their sums stay in the device's memory,
// and nothing waits for it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "device/device.h"
#include "device/table.h"
#include "kernels/kernels.h"
#include "muster/step.h"

namespace muster {

/// A view of the two fields of a metric in a tail; see kernels::metric_field.
inline at::Tensor metric_sums(const at::Tensor& tail, size_t slot) {
  return tail.narrow(0, static_cast<int64_t>(kernels::metric_field(static_cast<uint32_t>(slot))), 2);
}

/// One number on `device`. Only what is there already, or a number of the host, comes without waiting.
at::Tensor number_on(c10::Device device, const at::Tensor& number);

/// Throws InvalidArgument for a metric that is not one number.
void check_metric(const std::string& name, const at::Tensor& metric);

/// A window's numbers as 0-dim tensors on the device, for StepResult.
struct DeviceReport {
  at::Tensor memory;  ///< uint8; kernels::WindowReport and its metrics

  at::Tensor loss() const { return number(0); }
  at::Tensor weight() const { return number(1); }
  at::Tensor grad_norm() const { return number(2); }
  at::Tensor loss_scale() const { return number(3); }
  at::Tensor skipped() const;
  at::Tensor metric(size_t slot) const { return number(kFirstMetric + slot); }
  /// The skipped and the dropped flag; uint8.
  at::Tensor flags() const;

 private:
  static constexpr size_t kFirstMetric = sizeof(kernels::WindowReport) / sizeof(double);
  at::Tensor number(size_t index) const;
};

/// Numbers that optimizers and losses read, in one device's memory; the replicas on a device share it.
class DeviceScalars {
 public:
  DeviceScalars(c10::Device device, const kernels::LossScaleState& scale);

  kernels::StepScalars* scalars() const { return reinterpret_cast<kernels::StepScalars*>(at(0)); }
  kernels::LossScaleState* scale() const { return reinterpret_cast<kernels::LossScaleState*>(at(kScaleOffset)); }
  const at::Tensor& memory() const noexcept { return memory_; }
  c10::Device device() const noexcept { return device_; }

  void set_unit(double unit);
  void set_divisor(double divisor);
  void set_scale(const kernels::LossScaleState& scale);
  /// A copy of the loss scale on the device: 0-dim, fp64.
  at::Tensor scale_tensor() const;
  /// Wait for the device.
  kernels::LossScaleState read_scale() const;
  kernels::StepScalars read_scalars() const;

 private:
  static constexpr size_t kScaleOffset = 64;
  static_assert(sizeof(kernels::StepScalars) <= kScaleOffset);

  void* at(size_t offset) const { return static_cast<std::byte*>(memory_.mutable_data_ptr()) + offset; }
  void fill(size_t offset, double value);

  c10::Device device_;
  at::Tensor memory_;  // uint8
};

/// Called by the replica's thread, unless said otherwise, on the stream that is current there.
class DeviceNumbers {
 public:
  /// Metrics of different names that a set can have.
  static constexpr uint32_t kSlots = kernels::kMaxMetrics;

  DeviceNumbers(c10::Device device, std::shared_ptr<DeviceScalars> scalars);

  /// Whether `number` (a loss's weight, say) stays on a device, where only kernels look at it.
  bool is_unknown_to_host(const at::Tensor& number) const { return number.device() == device_ || !number.is_cpu(); }

  /// Adds a loss to the tail; `rows` is its weight unless it brings one. Returns the seed of its backward. Throws
  /// InvalidArgument for a metric that is not one number, or too many names.
  at::Tensor note(const Loss& loss, double rows, bool first);
  /// A micro-batch without a part.
  void note_absence(bool first);

  /// For the gradient engine: what gradients of the last loss are multiplied by, 0 where it does not contribute.
  const double* gate() const { return gate_.const_data_ptr<double>(); }
  /// Of the window so far, of this replica alone.
  const DeviceReport& report() const noexcept { return report_; }

  /// The metrics of this window and their slots.
  std::map<std::string, size_t> noted() const;
  /// Whether some of them have names that the replicas have not agreed on.
  bool has_new_names() const noexcept { return !new_names_.empty(); }
  /// The agreed names, by slot.
  const std::vector<std::string>& names() const noexcept { return names_; }
  /// Agrees on more names, in the order of their slots from here on. In a window: moves what was noted.
  void agree(const std::vector<std::string>& names);

  /// tail_size(kSlots) fields: this replica's, or, after its reduction, all replicas'.
  const at::Tensor& tail() const noexcept { return tail_; }
  /// The tail and behind it `room` numbers, whose values are whatever they are, so that both are reduced at once.
  /// tail() is then its beginning.
  const at::Tensor& with_room(int64_t room);
  /// What the last with_room() put behind the tail.
  at::Tensor room() const { return sums_.narrow(0, tail_.numel(), sums_.numel() - tail_.numel()); }
  /// The tail with metrics in the slots of another replica, to which it adds its own names, where there is room.
  at::Tensor tail_by(std::map<std::string, size_t>& slots) const;
  /// Of a window so far, by the sum of replicas' tails.
  DeviceReport report_of(const at::Tensor& tail) const;
  /// The sum of losses' weights in the tail.
  const double* weight() const { return tail_.const_data_ptr<double>() + kernels::kWeight; }
  c10::Device device() const noexcept { return device_; }
  /// Memory for a report.
  DeviceReport new_report() const;

 private:
  uint32_t slot_of(const std::string& name);
  void launch(const kernels::LossTerms& terms, const at::Tensor& tail, const at::Tensor& gate, void* seed,
              const DeviceReport& report) const;
  void add(const kernels::LossTerms& terms, void* seed);
  void open();

  c10::Device device_;
  std::shared_ptr<DeviceScalars> scalars_;
  GraphMemory memory_;  // of sums_
  at::Tensor sums_;     // fp64
  at::Tensor tail_;     // the beginning of it
  at::Tensor gate_;
  DeviceReport report_;
  std::vector<std::string> names_;      // agreed, by slot
  std::vector<bool> noted_;             // in this window, by slot of names_
  std::vector<std::string> new_names_;  // in this window, by slot after names_
};

}  // namespace muster
