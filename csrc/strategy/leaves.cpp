#include "strategy/leaves.h"

#include <string>

#include "muster/error.h"

namespace muster {

Leaves averageable(const Leaves& values) {
  Leaves floating;
  for (const auto& value : values) {
    const auto dtype = value.scalar_type();
    const bool is_averageable = at::isFloatingType(dtype) || at::isComplexType(dtype);
    floating.push_back(is_averageable ? value : value.to(at::kDouble));
  }
  return floating;
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
