#include "optimizer/step_segments.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include "cpp/catch.h"
#include "muster/error.h"

using namespace muster;

namespace {

const kernels::StepScalars kPlain{.divisor = 1, .clip = 1, .norm = 0, .unit = 1, .finite = 1, .dropped = 0};

FlatGroups sgd(double momentum = 0) {
  kernels::SgdGroup group{};
  group.lr = 1;
  group.momentum = momentum;
  return std::vector<kernels::SgdGroup>{group};
}

// Of rows 0 and 2 of a [4, 2] parameter: ones.
FlatGradient two_rows() {
  const auto rows = at::tensor({0, 2}, at::kLong).view({1, 2});
  return {{}, at::sparse_coo_tensor(rows, at::ones({2, 2}), {4, 2}).coalesce()};
}

}  // namespace

TEST_CASE("a share steps its run of a dense gradient, and stores it at the peers", "[optimizer]") {
  const auto memory = at::zeros({2, 8});  // a process's parameter, and a peer's
  OptimizerState state({{"p", memory[0]}}, sgd(), {});
  state.begin_step(0, 0);
  StepSegments segments;
  const FlatGradient gradient{at::ones({8}), {}};
  segments.add(state.entry(0), {2, 3}, memory.mutable_data_ptr(), gradient, sgd());
  CHECK(segments.singles().segments.size() == 1);
  CHECK(segments.doubles().segments.empty());
  const ptrdiff_t displacement = 8 * sizeof(float);
  segments.run(sgd(), kPlain, /*keep=*/false, {&displacement, 1});
  for (int row = 0; row < 2; ++row) CHECK(memory[row].equal(at::tensor({0, 0, -1, -1, -1, 0, 0, 0}, at::kFloat)));
}

TEST_CASE("sparse rows are segments, unless every row moves", "[optimizer]") {
  const auto parameter = at::zeros({4, 2});
  OptimizerState state({{"p", parameter}}, sgd(), {});
  StepSegments rows;
  rows.add(state.entry(0), {1, 7}, parameter.mutable_data_ptr(), two_rows(), sgd());
  REQUIRE(rows.singles().segments.size() == 2);
  CHECK(rows.singles().segments[0].n == 1);  // the run begins within row 0
  CHECK(rows.singles().segments[1].n == 2);
  StepSegments dense;
  state.begin_step(0, 1);
  dense.add(state.entry(0), {0, 8}, parameter.mutable_data_ptr(), two_rows(), sgd(0.9));
  REQUIRE(dense.singles().segments.size() == 1);
  CHECK(dense.singles().segments[0].n == 8);
}

TEST_CASE("row-wise Adagrad steps the rows that have a gradient", "[optimizer]") {
  kernels::AdagradGroup group{};
  group.lr = 1;
  const FlatGroups adagrad = std::vector<kernels::AdagradGroup>{group};
  const auto parameter = at::zeros({4, 2});
  OptimizerState state({{"p", parameter, 0, /*is_row_wise=*/true}}, adagrad, {});
  state.begin_step(0, 1);
  StepSegments segments;
  CHECK_THROWS_AS(segments.add_rows(state.entry(0), {at::ones({4, 2}), {}}, adagrad), InvalidArgument);
  segments.add_rows(state.entry(0), two_rows(), adagrad);
  segments.run(adagrad, kPlain, /*keep=*/false, {});
  CHECK(state.tensor(0, 0).equal(at::tensor({1, 0, 1, 0}, at::kFloat).view({4, 1})));
  CHECK(parameter.equal(at::tensor({-1, -1, 0, 0, -1, -1, 0, 0}, at::kFloat).view({4, 2})));
}

TEST_CASE("copies on other devices lie where the run does", "[optimizer]") {
  const auto memory = at::zeros({3, 8});
  OptimizerState state({{"p", memory[0]}}, sgd(), {});
  state.begin_step(0, 0);
  StepSegments segments;
  const std::vector<void*> copies{memory[1].mutable_data_ptr(), memory[2].mutable_data_ptr()};
  const FlatGradient dense{at::ones({8}), {}};
  segments.add(state.entry(0), {0, 0}, memory.mutable_data_ptr(), dense, sgd(), copies);
  CHECK(segments.singles().copies.empty());
  segments.add(state.entry(0), {2, 3}, memory.mutable_data_ptr(), dense, sgd(), copies);
  REQUIRE(segments.singles().copies.size() == 2);
  CHECK(segments.singles().copies[0] == memory[1].data_ptr<float>() + 2);
  CHECK(segments.singles().copies[1] == memory[2].data_ptr<float>() + 2);
}
