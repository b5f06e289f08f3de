// What steps a C++ flat optimizer, and how its state() follows.
#pragma once

#include <torch/optim/optimizer.h>

#include <memory>
#include <vector>

#include "optimizer/flat_optimizer.h"

namespace muster::detail {

struct FlatState {
  std::vector<c10::TensorImpl*> parameters;  // by position in the groups
  std::vector<int> indices;                  // of a strategy's registry; empty without one
  FlatOptimizer flat;
};

/// Where a flat optimizer keeps its FlatState; null for any other optimizer.
std::shared_ptr<FlatState>* flat_state_of(torch::optim::Optimizer& optimizer);

/// The optimizer's parameters in the order of its groups.
std::vector<at::Tensor> parameters_of(const torch::optim::Optimizer& optimizer);

/// The hyperparameters of a flat optimizer's groups.
FlatGroups groups_of(const torch::optim::Optimizer& optimizer);

/// Takes over the values of `optimizer.state()`, and puts views in their place.
void adopt_state(FlatState& state, torch::optim::Optimizer& optimizer);

/// After a step: views of state that is new, and step counts where they are on the host, in `optimizer.state()`.
void publish_state(FlatState& state, torch::optim::Optimizer& optimizer);

/// Step counts in `optimizer.state()`; waits for the device.
void publish_step_counts(const FlatState& state, const torch::optim::Optimizer& optimizer);

}  // namespace muster::detail
