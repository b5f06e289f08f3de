// What a set's losses are scaled by: the loss scale, and the unit of their weights.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>

#include <optional>

#include "kernels/kernels.h"
#include "muster/options.h"

namespace muster {

/// By what rule windows change the loss scale; empty: losses are not scaled.
inline std::optional<LossScale> loss_scale_rule(const StrategyOptions& options) {
  return !options.loss_scale && options.precision == Precision::fp16 ? LossScale() : options.loss_scale;
}

/// The factor of the seeds of backward, so that gradients of low precision neither vanish nor overflow, and the rule by
/// which windows change it. Owned by the stepping thread; replica threads read it in a step.
class WindowScale {
 public:
  explicit WindowScale(const StrategyOptions& options) : rule_(loss_scale_rule(options)) {
    if (rule_) state_.scale = static_cast<float>(rule_->init);
  }
  virtual ~WindowScale() = default;
  WindowScale(const WindowScale&) = delete;
  WindowScale& operator=(const WindowScale&) = delete;

  /// The scale of the next window, and for how many windows in a row it was finite. Waits for the device.
  virtual kernels::LossScaleState get() const { return state_; }
  virtual void set(const kernels::LossScaleState& state) { state_ = state; }
  /// The scale of the next window: 0-dim, fp64, where it is kept.
  virtual at::Tensor tensor() const { return at::scalar_tensor(state_.scale, at::kDouble); }

  /// What the host knows: the current scale or, where devices change it, the one that was set last.
  const kernels::LossScaleState& on_host() const noexcept { return state_; }

  /// The unit, see kernels::next_unit; empty before a window or set_unit(). Waits for the device.
  virtual std::optional<double> unit() const = 0;
  /// Between windows: the unit of a job that was interrupted, in place of a guess from the first parts.
  virtual void set_unit(double unit) = 0;

  /// Empty: the scale stays as it is.
  const std::optional<LossScale>& rule() const noexcept { return rule_; }

  /// After a window that was stepped, or skipped because it was not finite.
  void update(bool finite) noexcept {
    if (rule_) kernels::loss_scale_update(&state_, finite, rule_->growth, rule_->backoff, rule_->interval);
  }

 private:
  std::optional<LossScale> rule_;
  kernels::LossScaleState state_{.scale = 1, .growth_tracker = 0};
};

}  // namespace muster
