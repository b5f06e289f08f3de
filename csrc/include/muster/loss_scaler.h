// Loss scaling for a training loop without a strategy; a strategy scales its losses by itself.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <unordered_map>

#include "muster/precision.h"

namespace muster {

/// What a LossScaler learns; equal to GradScaler's `_scale` and `_growth_tracker`.
struct LossScalerState {
  double scale = 0;        ///< what the next loss is multiplied by
  int growth_tracker = 0;  ///< finite steps since it last changed

  /// Whether both are equal.
  bool operator==(const LossScalerState&) const = default;
};

/// torch.amp.GradScaler for a loop without a strategy:
///     scaler.scale(loss).backward();
///     scaler.unscale(optimizer);       // optional: to clip, say
///     scaler.step(optimizer);
///     scaler.update();
/// Owned by one thread. The finite check runs on the gradients' device; step() reads it.
class LossScaler {
 public:
  /// Throws as LossScale::validate.
  explicit LossScaler(const LossScale& options = {});

  /// `loss` times the scale.
  at::Tensor scale(const at::Tensor& loss);

  /// Divides the gradients of the optimizer's parameters by the scale and notes whether all are finite. At most once
  /// between updates for each optimizer: throws InvalidArgument, also for fp16 gradients, which cannot be divided.
  void unscale(torch::optim::Optimizer& optimizer);

  /// Unscales unless done, and steps the optimizer if its gradients are finite; returns whether it did. At most once
  /// between updates for each optimizer: throws InvalidArgument.
  bool step(torch::optim::Optimizer& optimizer);

  /// Ends the iteration: backs the scale off if any gradient was not finite, else counts towards growth. Throws
  /// InvalidArgument if no optimizer was unscaled.
  void update();

  /// What the next loss is multiplied by.
  double scale() const { return state_.scale; }
  /// To save and to give to load_state().
  const LossScalerState& state() const { return state_; }
  /// Throws InvalidArgument unless the scale is positive and the tracker not negative.
  void load_state(const LossScalerState& state);

 private:
  struct Progress {
    bool finite = true;
    bool stepped = false;
  };

  LossScale options_;
  LossScalerState state_;
  std::unordered_map<const torch::optim::Optimizer*, Progress> progress_;  // since the last update
};

}  // namespace muster
