// The fp32 master copies of a flat optimizer's low-precision parameters, on their way between states and archives: by
// position, undefined where there is none.
#pragma once

#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <vector>

#include "optimizer/flat_state.h"

namespace muster::detail {

/// Those that `state`, or the parameter servers that hold it, has of `parameters`, in their order.
std::vector<at::Tensor> masters_of(const FlatState& state, const std::vector<c10::TensorImpl*>& parameters);

/// Whether there may be no other state of a parameter than its fp32 copy: of an optimizer that counts no steps.
bool may_have_master_alone(const torch::optim::Optimizer& optimizer);

/// Gives the optimizer's parameters those that they had elsewhere. Throws InvalidArgument for another shape.
void set_masters(FlatState& state, const torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& masters);

/// Writes those that there are under a name that torch's optimizers do not read.
void write_masters(torch::serialize::OutputArchive& archive, const std::vector<at::Tensor>& masters);

/// Empty where the archive has none.
std::vector<at::Tensor> read_masters(torch::serialize::InputArchive& archive, size_t num_parameters);

}  // namespace muster::detail
