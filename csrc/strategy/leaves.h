// The values that collectives of user code take and give.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "muster/reduce_op.h"

namespace muster {

/// The values of one replica: leaves of a structure, equal in number, shape and dtype on all replicas that take part.
using Leaves = std::vector<at::Tensor>;

/// Of the mean of values of `dtype`: of integers and bools fp64, of others their own.
at::ScalarType dtype_of_mean(at::ScalarType dtype);

/// Throws InvalidArgument for a tensor that is undefined or not strided (a sparse one, say).
void check_dense(const Leaves& values);

/// Throws InvalidArgument for the minimum or maximum of complex numbers, which have no order.
void check_order(const Leaves& values, ReduceOp op);

}  // namespace muster
