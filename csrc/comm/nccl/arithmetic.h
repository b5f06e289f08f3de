// What NCCL computes in.
#pragma once

#include <c10/core/ScalarType.h>

#include "comm/nccl/api.h"
#include "muster/reduce_op.h"

namespace muster::comm::nccl {

/// Of an operation.
struct Arithmetic {
  DataType type;
  Reduction reduction;
};

/// Throws InvalidArgument for a dtype that NCCL lacks.
Arithmetic arithmetic_of(at::ScalarType dtype, ReduceOp op);

}  // namespace muster::comm::nccl
