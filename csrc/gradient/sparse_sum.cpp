#include "gradient/sparse_sum.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "core/flat_layout.h"
#include "core/plain_memory.h"

namespace muster {

namespace {

at::Tensor make_sparse(const at::Tensor& indices, const at::Tensor& values, at::IntArrayRef sizes) {
  return at::_sparse_coo_tensor_unsafe(indices, values, sizes, values.options().layout(at::kSparse));
}

// At most two values meet in a row, and a + b = b + a in floating point: the order inside coalesce does not matter.
at::Tensor add_coalesced(const at::Tensor& a, const at::Tensor& b) {
  return make_sparse(at::cat({a._indices(), b._indices()}, 1), at::cat({a._values(), b._values()}, 0), a.sizes())
      .coalesce();
}

}  // namespace

at::Tensor add_sparse(const at::Tensor& sum, const at::Tensor& gradient, const at::Tensor& factor) {
  const auto given = gradient.detach().to(accumulation_dtype(gradient.scalar_type())).coalesce();
  auto values = in_plain_memory(given._values());
  if (factor.defined()) {
    const auto share = factor.to(c10::toRealValueType(values.scalar_type()));
    values = at::where(share.ne(0), values * share, at::zeros({}, values.options()));
  }
  const auto rows = make_sparse(given._indices(), values, given.sizes())._coalesced_(true);
  return sum.defined() ? add_coalesced(sum, rows) : rows;
}

at::Tensor sum_sparse_over_ranks(comm::Communicator& communicator, const at::Tensor& local,
                                 const at::Tensor& parameter) {
  const auto sizes = local.defined() ? local.sizes() : parameter.sizes();  // of its rows, whatever became of it since
  auto indices = local.defined() ? local._indices().t().contiguous()
                                 : at::empty({0, 1}, parameter.options().dtype(at::kLong).requires_grad(false));
  auto values = local.defined() ? local._values().contiguous() : at::Tensor();
  if (!values.defined()) {
    auto none = parameter.sizes().vec();
    none[0] = 0;
    values =
        at::empty(none, parameter.options().dtype(accumulation_dtype(parameter.scalar_type())).requires_grad(false));
  }
  auto index_work = communicator.all_gather(indices);
  auto value_work = communicator.all_gather(as_real(values));
  index_work.wait();
  value_work.wait();
  const auto all_indices = index_work.outputs();
  const auto all_values = value_work.outputs();
  std::vector<at::Tensor> level;
  for (size_t r = 0; r < all_indices.size(); ++r) {
    const auto theirs = parameter.is_complex() ? at::view_as_complex(all_values[r]) : all_values[r];
    level.push_back(make_sparse(all_indices[r].t(), theirs, sizes)._coalesced_(true));
  }
  while (level.size() > 1) {
    std::vector<at::Tensor> next;
    for (size_t r = 0; r + 1 < level.size(); r += 2) next.push_back(add_coalesced(level[r], level[r + 1]));
    if (level.size() % 2 != 0) next.push_back(level.back());
    level = std::move(next);
  }
  return level.front();
}

}  // namespace muster
