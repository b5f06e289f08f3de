#include "strategy/leaves.h"

#include <string>

#include "muster/error.h"

namespace muster {

at::ScalarType dtype_of_mean(at::ScalarType dtype) {
  return at::isFloatingType(dtype) || at::isComplexType(dtype) ? dtype : at::kDouble;
}

void check_dense(const Leaves& values) {
  for (const auto& value : values) {
    if (!value.defined())
      throw InvalidArgument("an undefined tensor cannot travel; give one, of no elements if need be");
    if (value.layout() == at::kStrided) continue;
    throw InvalidArgument("a tensor of layout " + c10::str(value.layout()) +
                          " cannot travel; make it dense (to_dense()), or its indices and values separately");
  }
}

void check_order(const Leaves& values, ReduceOp op) {
  if (op != ReduceOp::min && op != ReduceOp::max) return;
  for (const auto& value : values) {
    if (!value.is_complex()) continue;
    throw InvalidArgument(std::string("complex numbers have no ") + (op == ReduceOp::min ? "minimum" : "maximum") +
                          "; reduce their abs(), or their real and imaginary parts");
  }
}

}  // namespace muster
