// The state of a C++ flat optimizer: what steps it, and how its state() follows.
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <vector>

#include "optimizer/flat_optimizer.h"

namespace muster::detail {

struct FlatState {
  std::vector<c10::TensorImpl*> parameters;  // by position in the groups
  std::vector<int> indices;                  // of a strategy's registry; empty without one
  FlatOptimizer flat;
  std::weak_ptr<const void> owner = {};             // whose registry that is
  std::vector<int64_t> published_steps = {};        // by position, as state() was given them last
  std::vector<const void*> published_entries = {};  // likewise; identities
  /// Throws where a step by hand would apply gradients again that the strategy has applied. Null without one.
  std::function<void()> check_step_by_hand = {};
  /// For each of `which`, a tensor by position, undefined where there is none; they are StateEntry's, kSteps for step
  /// counts.
  using FromServers = std::function<std::vector<std::vector<at::Tensor>>(const std::vector<size_t>& which)>;
  FromServers from_servers = {};  ///< not null where parameter servers hold the state
  bool is_lost = false;           // the servers that held it are gone

  static constexpr size_t kSteps = StateEntry::kMaster + 1;
};

/// Where a flat optimizer keeps its FlatState; null for any other optimizer.
std::shared_ptr<FlatState>* flat_state_of(torch::optim::Optimizer& optimizer);

/// What ends with a flat optimizer; null for any other one.
std::shared_ptr<const void> life_of(torch::optim::Optimizer& optimizer);

/// Puts `state` in the place of the one that a flat optimizer has, if any. It takes over what is in
/// `optimizer.state()`, and the master copies that were loaded, or that the one before has of the same parameters.
/// Throws as follow_state.
void replace_state(torch::optim::Optimizer& optimizer, std::shared_ptr<FlatState> state);

/// The fp32 master copies that a flat optimizer has, loaded or its own, by the parameters' positions; undefined or left
/// out where there is none. Of any other optimizer: none.
std::vector<at::Tensor> masters_in(torch::optim::Optimizer& optimizer);
/// Those that its next FlatState takes over.
void leave_masters(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& masters);

/// The optimizer's parameters in the order of its groups.
std::vector<at::Tensor> parameters_of(const torch::optim::Optimizer& optimizer);

/// Whether the state is of all parameters that the optimizer has, in their order and groups.
bool has_all(const FlatState& state, const torch::optim::Optimizer& optimizer);

/// The hyperparameters of a flat optimizer's groups.
FlatGroups groups_of(const torch::optim::Optimizer& optimizer);

/// Takes over what user code replaced or removed in `optimizer.state()` since the last step, or all of it before the
/// first one, and puts views in its place. Throws InvalidArgument where parameter servers hold the state, or where an
/// entry lacks a tensor that torch's step does not do without.
void follow_state(FlatState& state, torch::optim::Optimizer& optimizer);

/// `from_servers` holds the state from here on: entries without tensors stand in `optimizer.state()`.
void leave_to_servers(FlatState& state, torch::optim::Optimizer& optimizer, FlatState::FromServers from_servers);

/// `optimizer.state()` becomes a copy of what parameter servers hold.
void copy_from_servers(const FlatState& state, torch::optim::Optimizer& optimizer);

/// Before parameter servers are left: the state is `optimizer.state()` again, or, where they are gone, lost, which the
/// optimizer says when it is used.
void bring_back(FlatState& state, torch::optim::Optimizer& optimizer) noexcept;

/// After a step: views of state that is new, and step counts where they are on the host, in `optimizer.state()`.
void publish_state(FlatState& state, torch::optim::Optimizer& optimizer);

/// Step counts in `optimizer.state()`; waits for the device.
void publish_step_counts(FlatState& state, const torch::optim::Optimizer& optimizer);

}  // namespace muster::detail
