// Gradients by rows.
#pragma once

#include <ATen/core/Tensor.h>

namespace muster {

/// The gradient of a tensor of at least one dimension as a COO tensor with one sparse dimension, on its device: from a
/// dense one, and from one with several sparse dimensions (torch.gather with sparse_grad=True), all rows in which
/// something is. One that has rows alone is returned as it is, perhaps not coalesced.
at::Tensor by_rows(const at::Tensor& gradient);

}  // namespace muster
