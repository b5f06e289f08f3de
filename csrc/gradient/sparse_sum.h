// Sums of sparse gradients: rows are gathered, coalesced and added along the same tree as dense ones.
#pragma once

#include <ATen/core/Tensor.h>

#include "comm/communicator.h"

namespace muster {

/// `sum + gradient` as a coalesced sparse COO tensor in the accumulation dtype; `sum` may be undefined.
at::Tensor add_sparse(const at::Tensor& sum, const at::Tensor& gradient);

/// Collective. The coalesced sum over ranks of `local` (coalesced, or undefined where the rank has no rows), equal in
/// bits on every rank. `parameter` gives the sizes. Gradients have one sparse dimension, as those of torch.nn do.
at::Tensor sum_sparse_over_ranks(comm::Communicator& communicator, const at::Tensor& local,
                                 const at::Tensor& parameter);

}  // namespace muster
