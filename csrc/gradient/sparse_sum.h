// Sums of sparse gradients: rows are gathered, coalesced and added along the same tree as dense ones.
#pragma once

#include <ATen/core/Tensor.h>

#include "comm/communicator.h"

namespace muster {

/// `sum + factor * gradient` as a coalesced sparse COO tensor in the accumulation dtype, its values in plain memory;
/// `sum` may be undefined. `factor` is 0-dim, undefined for 1; a gradient whose factor is 0 leaves no trace but its
/// rows.
at::Tensor add_sparse(const at::Tensor& sum, const at::Tensor& gradient, const at::Tensor& factor);

/// Collective. The coalesced sum over ranks of `local` (coalesced, or undefined where the rank has no rows), equal in
/// bits on every rank. `parameter` gives the sizes. Gradients are as of by_rows().
at::Tensor sum_sparse_over_ranks(comm::Communicator& communicator, const at::Tensor& local,
                                 const at::Tensor& parameter);

}  // namespace muster
