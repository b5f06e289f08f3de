#include "strategy/leaves.h"

#include <string>

#include "muster/error.h"

namespace muster {

at::ScalarType dtype_of_mean(at::ScalarType dtype) {
  return at::isFloatingType(dtype) || at::isComplexType(dtype) ? dtype : at::kDouble;
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
