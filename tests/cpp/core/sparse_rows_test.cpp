#include "core/sparse_rows.h"

#include <ATen/ATen.h>

#include "cpp/catch.h"

using namespace muster;

TEST_CASE("gradients of any layout are given by rows", "[core]") {
  const auto indices = at::tensor({3, 1, 3, 1, 3, 0, 2, 0, 1, 0}, at::kLong).view({2, 5});
  const auto values = at::arange(1, 6, at::kFloat);
  const auto gradient = at::sparse_coo_tensor(indices, values, {5, 3});
  const auto rows = by_rows(gradient);
  CHECK(rows.sparse_dim() == 1);
  CHECK(rows.is_coalesced());
  CHECK(rows.indices().equal(at::tensor({1, 3}, at::kLong).unsqueeze(0)));
  CHECK(rows.to_dense().equal(gradient.to_dense()));
  CHECK(by_rows(rows).is_same(rows));
  CHECK(by_rows(gradient.to_dense()).to_dense().equal(gradient.to_dense()));

  const auto empty = by_rows(at::sparse_coo_tensor(at::empty({2, 0}, at::kLong), at::empty({0}), {5, 3}));
  CHECK(empty.sizes() == at::IntArrayRef({5, 3}));
  CHECK(empty._nnz() == 0);

  const auto deep = at::sparse_coo_tensor(indices, at::rand({5, 2}), {5, 3, 2});
  CHECK(by_rows(deep).to_dense().equal(deep.to_dense()));
}
