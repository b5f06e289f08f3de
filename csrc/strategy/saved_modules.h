// What a checkpoint holds of a module: what state_dict() has in Python, parameters and buffers by name, without weights
// that servers alone hold.
#pragma once

#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "muster/saved_value.h"

namespace muster::detail {

/// The tensors by name, shared with the module but for weights whose rows are fetched from servers.
SavedValue::Dict state_of_module(const torch::nn::Module& module);

/// Of those the parameters' names.
std::vector<std::string> parameter_names(const torch::nn::Module& module);

/// Throws LayoutMismatch where names or shapes differ; `what` names the module in messages.
void check_module(const torch::nn::Module& module, const SavedValue::Dict& saved, const std::string& what);

/// After check_module: takes over the values.
void take_module(const torch::nn::Module& module, const SavedValue::Dict& saved);

}  // namespace muster::detail
