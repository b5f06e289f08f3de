#include "comm/nccl/roll.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>

#include <algorithm>

namespace muster::comm::nccl {
namespace {

at::Tensor combine(const at::Tensor& a, const at::Tensor& b, ReduceOp op) {
  if (!a.defined()) return b;
  if (!b.defined()) return a;
  if (op == ReduceOp::min) return at::minimum(a, b);
  return op == ReduceOp::max ? at::maximum(a, b) : a + b;
}

}  // namespace

bool Roll::is_everyone() const noexcept {
  return std::all_of(requests_.begin(), requests_.end(), [](const auto& request) { return request.has_value(); });
}

bool Roll::has_equal_sizes() const {
  return is_everyone() && std::all_of(requests_.begin(), requests_.end(),
                                      [&](const auto& request) { return request->numel == requests_[0]->numel; });
}

at::Tensor reduce_along_tree(std::vector<at::Tensor> terms, ReduceOp op) {
  const auto first = std::find_if(terms.begin(), terms.end(), [](const at::Tensor& term) { return term.defined(); });
  const at::ScalarType dtype = first->scalar_type();
  if (dtype == at::kBFloat16 || dtype == at::kHalf) {
    for (at::Tensor& term : terms) {
      if (term.defined()) term = term.to(at::kFloat);
    }
  }
  for (; terms.size() > 1; terms.resize((terms.size() + 1) / 2)) {
    for (size_t i = 0; i < terms.size(); i += 2) {
      terms[i / 2] = i + 1 < terms.size() ? combine(terms[i], terms[i + 1], op) : terms[i];
    }
  }
  return terms[0].to(dtype);
}

}  // namespace muster::comm::nccl
