// What a checkpoint holds of an optimizer: torch.optim's state_dict() with names of parameters instead of numbers, so
// that Python reads what C++ saved, and the other way round.
#pragma once

#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

#include "comm/communicator.h"
#include "muster/saved_value.h"
#include "strategy/divided_tensors.h"
#include "window/parameter_registry.h"

namespace muster::detail {

/// The number of an optimizer's parameter. Throws InvalidArgument for one of no prepared module.
int index_of(const ParameterRegistry& registry, const at::Tensor& parameter);

/// The names of an optimizer's parameters in the order of its groups. Those of several modules may be called alike: the
/// second is then "name#2". Throws InvalidArgument for a parameter of no prepared module.
std::vector<std::string> parameter_names(const torch::optim::Optimizer& optimizer, const ParameterRegistry& registry);

/// Options by group that C++ has no use for, as Python's schedulers leave some there.
using OtherOptions = std::vector<SavedValue::Dict>;

/// The key in a parameter's state of the fp32 copy of one of low precision.
inline constexpr const char* kMaster = "master";

/// {"name", "groups": [{options, "params": names}], "state": {name: {...}}}. Collective over `workers` where the state
/// is divided over them, but for tensors that get a stand-in in `divided`, where that is not null. Throws
/// InvalidArgument for an optimizer that is none of visit_torch_optimizer's.
SavedValue::Dict save_optimizer(torch::optim::Optimizer& optimizer, const std::vector<std::string>& names,
                                const OtherOptions& others, comm::Communicator& workers, DividedTensors* divided);

/// Throws LayoutMismatch where `saved` is of another optimizer, of other parameters or groups, or asks for what C++ has
/// not. `what` names the optimizer in messages.
void check_optimizer(const torch::optim::Optimizer& optimizer, const std::vector<std::string>& names,
                     const SavedValue::Dict& saved, const std::string& what);

/// `saved` with names where it has positions in the order of the groups, as what was made of another format's file.
/// Throws LayoutMismatch for a position that there is not.
SavedValue::Dict with_names(const SavedValue::Dict& saved, const std::vector<std::string>& names);

/// After check_optimizer and, for a flat optimizer, once its FlatState is there: takes over options and state.
/// `saved` is with names.
OtherOptions load_optimizer(torch::optim::Optimizer& optimizer, const std::vector<std::string>& names,
                            const SavedValue::Dict& saved);

/// Throws LayoutMismatch naming the first of `ours` that is not in `saved`, or the other way round.
void compare_names(const std::vector<std::string>& ours, const std::vector<std::string>& saved,
                   const std::string& what);

}  // namespace muster::detail
