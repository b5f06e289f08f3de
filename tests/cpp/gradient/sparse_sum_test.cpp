#include "gradient/sparse_sum.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "cpp/catch.h"
#include "support/run_ranks.h"

namespace muster {
namespace {

at::Tensor rows_of(const std::vector<int64_t>& rows, double value) {
  const auto count = static_cast<int64_t>(rows.size());
  return at::sparse_coo_tensor(at::tensor(rows).view({1, count}), at::zeros({count, 2}).fill_(value), {5, 2});
}

}  // namespace

TEST_CASE("sparse gradients add up, times their factor", "[gradient]") {
  auto sum = add_sparse(at::Tensor(), rows_of({1, 1, 3}, 2), at::Tensor());
  CHECK(sum.is_coalesced());
  sum = add_sparse(sum, rows_of({3, 4}, 1), at::scalar_tensor(0.5, at::kDouble));
  const auto dense = sum.to_dense();
  CHECK(dense[1][0].item<double>() == 4);
  CHECK(dense[3][1].item<double>() == 2.5);
  CHECK(dense[4][0].item<double>() == 0.5);
}

TEST_CASE("sparse sums are every rank's, those of ranks without rows included", "[gradient]") {
  using namespace testing;
  CHECK(Local::run(3, [](comm::Communicator& c) {
          const auto parameter = at::zeros({5, 2});
          const auto local = c.rank() == 1 ? at::Tensor() : rows_of({c.rank(), 4}, c.rank() + 1.0).coalesce();
          const auto sum = sum_sparse_over_ranks(c, local, parameter).to_dense();
          MUSTER_CHECK(sum[0][0].item<double>() == 1);
          MUSTER_CHECK(sum[2][1].item<double>() == 3);
          MUSTER_CHECK(sum[4][0].item<double>() == 4);
        }) == "");
}

}  // namespace muster
