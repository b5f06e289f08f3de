// The end of windows whose replicas work on streams: what replicas tell each other goes through the control group,
// numbers stay on the device, and nothing waits for it.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "device/segments.h"
#include "optimizer/gradient_norm.h"
#include "window/closing.h"
#include "window/device_buffers.h"
#include "window/device_numbers.h"
#include "window/device_shares.h"
#include "window/window.h"
#include "window/window_context.h"

namespace muster {

/// The loss scale in the memory of every device.
class DeviceScale : public WindowScale {
 public:
  DeviceScale(const StrategyOptions& options, const std::vector<std::shared_ptr<DeviceScalars>>& of_devices)
      : WindowScale(options), of_devices_(of_devices) {}

  kernels::LossScaleState get() const override { return of_devices_.front()->read_scale(); }
  void set(const kernels::LossScaleState& state) override;
  at::Tensor tensor() const override { return of_devices_.front()->scale_tensor(); }
  std::optional<double> unit() const override;
  void set_unit(double unit) override;

  bool has_unit() const noexcept { return has_unit_; }
  void note_unit() noexcept { has_unit_ = true; }

 private:
  const std::vector<std::shared_ptr<DeviceScalars>>& of_devices_;  // by local replica
  bool has_unit_ = false;
};

class DeviceWindow : public Window {
 public:
  explicit DeviceWindow(const WindowContext& context);
  ~DeviceWindow() override;
  DeviceWindow(const DeviceWindow&) = delete;
  DeviceWindow& operator=(const DeviceWindow&) = delete;

  void open() override;
  void weigh(int local_replica, double rows) override;
  NotedPart note(const ReplicaPart& part) override;
  ClosedWindow close(int local_replica, const Closing& closing) override;
  void finish(const Tail& tail, bool fused, WindowSums& sums) override;
  kernels::StepScalars* leave_means(const Tail& tail, const std::function<void()>& edit) override;
  void update(const Tail& tail, FlatOptimizer& optimizer, const std::vector<int>& parameters, const FlatGroups& groups,
              const OnReplicas& on_replicas) override;
  WindowSums so_far() const override;
  WindowScale& loss_scale() override { return scale_; }

 private:
  struct Replica {
    std::unique_ptr<DeviceNumbers> numbers;
    std::optional<c10::Stream> made_on;  // whose memory what lives longer than a window is
    std::optional<c10::Stream> last;     // that a window ended on
    DeviceBuffers buffers;
    LossCounts losses;                       // of the window, as far as the host knows their weights
    std::vector<std::string> noted_metrics;  // of the window, by any replica
  };

  void agree_on_metrics(Replica& replica, const Tail& tail, comm::Communicator& control);
  void enqueue_norm(const Tail& tail, const at::Tensor& numbers, double loss_scale, kernels::LossScaleState* scale,
                    const DeviceReport& report);
  void enqueue_means(const Tail& tail, bool clips);
  std::vector<DeviceNorm::Part> parts(const Tail& tail) const;
  bool step_in_shares(const Tail& tail, FlatOptimizer& optimizer, const std::vector<int>& parameters,
                      const FlatGroups& groups);
  void gather(const Tail& tail, FlatOptimizer& optimizer, const std::vector<int>& parameters) const;
  std::vector<std::vector<Run>> stepped_runs(const Tail& tail, const FlatOptimizer& optimizer,
                                             const std::vector<int>& parameters) const;
  void step_whole(const Tail& tail, FlatOptimizer& optimizer, const std::vector<int>& parameters,
                  const FlatGroups& groups);
  void leave_clipped_means(const Tail& tail, WindowSums& sums);
  StepResult sums_so_far() const;

  WindowContext context_;
  std::optional<DeviceShares> shares_;                   // where devices divide steps
  bool is_mended_ = false;                               // since the window's end
  std::vector<std::shared_ptr<DeviceScalars>> scalars_;  // by local replica
  DeviceScale scale_;
  std::vector<Replica> replicas_;
  DeviceNorm norm_;
  DeviceSegments<kernels::MeanSegment> mean_segments_;
  DeviceReport report_;  // of the last window
};

}  // namespace muster
