// What a step function returns, and what a step gives back.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "muster/per_replica.h"

namespace muster {

/// `mean`: the loss is a mean over `weight` samples, and gradients are averaged by weight over all replicas and
/// micro-batches. `sum`: the loss is a sum; gradients are added and never divided.
enum class Reduction { mean, sum };

/// The result of a step function: a 0-dim floating `value` to differentiate, and what belongs to it. Implicit from a
/// Tensor.
struct Loss {
  at::Tensor value;  ///< 0-dim and floating
  /// Samples (or tokens, ...) that `value` is a mean over: 0-dim. Empty, or undefined: the part's samples, those that a
  /// prepared loader asked the data set for, else size(0) of its first tensor. On CUDA it is not read on the host: one
  /// that is negative or not finite drops the window, whose weight is then NaN.
  std::optional<at::Tensor> weight = std::nullopt;
  /// 0-dim tensors, averaged over replicas and micro-batches by weight.
  std::map<std::string, at::Tensor> metrics = {};
  /// Anything; StepResult::output carries it, detached from nothing.
  c10::IValue output = {};
  Reduction reduction = Reduction::mean;  ///< whether `value` is a mean or a sum

  Loss() = default;
  /// The mean over the part's samples.
  Loss(at::Tensor loss) : value(std::move(loss)) {}  // NOLINT(google-explicit-constructor)
};

/// What one step did. `stepped` and `step` are host values; tensors are 0-dim, fp64 (`skipped`: bool) on local replica
/// 0's device, and reading one is the only thing that waits for it.
struct StepResult {
  /// True if this call closed a window and its update was handed to the optimizer. On CUDA also where all of the
  /// window's weights are 0 on the device, which then changes nothing.
  bool stepped = false;
  /// Windows closed so far, skipped ones included.
  int64_t step = 0;
  /// Mean loss (sum, for Reduction::sum) of the window so far: over all workers once it is closed, this worker's
  /// before.
  at::Tensor loss;
  /// Loss::metrics by name: their means over the window so far, by weight.
  std::map<std::string, at::Tensor> metrics;
  /// Sum of the weights of the window so far.
  at::Tensor weight;
  /// Norm of the mean gradient before clipping; undefined while the window is open.
  at::Tensor grad_norm;
  /// True if the window's update was skipped because a gradient was not finite.
  at::Tensor skipped;
  /// The loss scale after this step's update; 1 where losses are not scaled.
  at::Tensor loss_scale;
  /// Loss::output of each local replica; None for an empty part.
  PerReplica<c10::IValue> output;
};

}  // namespace muster
