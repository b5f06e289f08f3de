#include "comm/nccl/arithmetic.h"

#include <string>

#include "muster/error.h"

namespace muster::comm::nccl {

Arithmetic arithmetic_of(at::ScalarType dtype, ReduceOp op) {
  const Reduction reduction = op == ReduceOp::min   ? Reduction::min
                              : op == ReduceOp::max ? Reduction::max
                                                    : Reduction::sum;
  switch (dtype) {
    case at::kFloat:
      return {DataType::f32, reduction};
    case at::kDouble:
      return {DataType::f64, reduction};
    case at::kBFloat16:
      return {DataType::bf16, reduction};
    case at::kHalf:
      return {DataType::f16, reduction};
    case at::kLong:
      return {DataType::i64, reduction};
    case at::kInt:
      return {DataType::i32, reduction};
    case at::kChar:
      return {DataType::i8, reduction};
    case at::kByte:
      return {DataType::u8, reduction};
    case at::kBool:  // bytes of 0 and 1, whose sum is a logical or
      return {DataType::u8, op == ReduceOp::sum ? Reduction::max : reduction};
    default:
      throw InvalidArgument(std::string("NCCL has no arithmetic for dtype ") + c10::toString(dtype) +
                            "; convert the tensor to int32");
  }
}

}  // namespace muster::comm::nccl
