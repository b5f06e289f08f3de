// From summed gradients to what every step kernel reads: divisor, norm, clip factor, finite or not.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "kernels/kernels.h"

namespace muster {

/// `sums` are dense tensors, fp32 or fp64, in registration order; `tail` is the window's, from kernels::kWeight on.
/// Fills `scalars` by kernels::finish_window, whose `unit` is that of the window's seeds and is kept. A norm that
/// overflows though every value is finite counts as finite.
void take_norm(const std::vector<at::Tensor>& sums, const double* tail, double clip_norm, double loss_scale,
               kernels::StepScalars& scalars);

}  // namespace muster
