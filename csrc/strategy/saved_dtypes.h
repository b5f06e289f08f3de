// Parameters that have another dtype than in a checkpoint.
#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

#include "muster/saved_value.h"

namespace muster::detail {

/// An optimizer that is to be loaded, and what a checkpoint has of it.
struct OptimizerToLoad {
  torch::optim::Optimizer& optimizer;
  std::vector<std::string> names;  ///< parameter_names
  SavedValue::Dict saved;          ///< with names, see with_names
};

/// Lets `saved_modules`, what a checkpoint has of `modules`, and the optimizers' states keep the bits that a change of
/// dtype would take from them. A parameter of low precision whose fp32 master copy is there is taken from that one; one
/// that becomes of low precision has what was saved for its master copy.
void follow_dtypes(const std::vector<const torch::nn::Module*>& modules, std::vector<SavedValue::Dict>& saved_modules,
                   std::vector<OptimizerToLoad>& optimizers);

}  // namespace muster::detail
