// Hyperparameters on their way from Python.
#pragma once

#include <string>
#include <vector>

#include "optimizer/flat_optimizer.h"

namespace muster {

/// `algorithm` is "adam", "sgd" or "adagrad"; a row holds one group's members of kernels::AdamGroup, SgdGroup or
/// AdagradGroup in their order. Throws InvalidArgument for a row of another length.
FlatGroups flat_groups(const std::string& algorithm, const std::vector<std::vector<double>>& rows);

}  // namespace muster
