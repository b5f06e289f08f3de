#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>

#include <string>
#include <vector>

#include "cpp/catch.h"
#include "muster/error.h"
#include "muster/optim.h"
#include "optimizer/flat_optimizer.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::testing;

namespace {

const FlatGroups kFollowingAdam = std::vector<kernels::AdamGroup>{{0.1, 0.9, 0.999, 1e-8, 0, true, false, false}};
const FlatGroups kFollowingSgd = std::vector<kernels::SgdGroup>{{0.125, 0, 0, 0, false, false}};
const kernels::StepScalars kPlainScalars{.divisor = 1, .clip = 1, .norm = 0, .unit = 1, .finite = 1, .dropped = 0};

std::vector<FlatParameter> numbered(const std::vector<at::Tensor>& parameters) {
  std::vector<FlatParameter> list;
  for (const auto& tensor : parameters) list.push_back({"p" + std::to_string(list.size()), tensor});
  return list;
}

at::Tensor ones_leaf(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
  return at::ones(sizes, dtype).requires_grad_();
}

void step_by_ones(FlatOptimizer& optimizer, const at::Tensor& parameter, const FlatGroups& groups, bool from_grad) {
  if (from_grad) {
    parameter.mutable_grad() = at::ones_like(parameter);
    return optimizer.step_from_grad(groups);
  }
  const auto dtype = accumulation_dtype(parameter.scalar_type());
  optimizer.step({{at::ones(parameter.sizes(), dtype), {}}}, groups, &kPlainScalars, /*keep=*/false);
}

bool have_all_moved(const at::Tensor& parameter) { return parameter.ne(1).all().item<bool>(); }

}  // namespace

TEST_CASE("a parameter without state is stepped in whatever size it has", "[optimizer]") {
  const bool from_grad = GENERATE(false, true);
  const auto w = ones_leaf({10, 4});
  FlatOptimizer sgd(numbered({w}), kFollowingSgd);
  step_by_ones(sgd, w, kFollowingSgd, from_grad);
  for (const int64_t rows : {16, 3, 70000}) {
    w.set_data(at::ones({rows, 4}));
    step_by_ones(sgd, w, kFollowingSgd, from_grad);
    CHECK(have_all_moved(w));
    CHECK(sgd.state().entry(0).run.count == w.numel());
  }
  FlatOptimizer adam(numbered({w}), kFollowingAdam);
  w.set_data(at::ones({5, 4}));  // before the first step
  step_by_ones(adam, w, kFollowingAdam, from_grad);
  CHECK(have_all_moved(w));
  CHECK(adam.state().tensor(0, 0).sizes() == w.sizes());
}

TEST_CASE("a parameter of another size than its state is refused until that has its size, or is dropped",
          "[optimizer]") {
  const bool from_grad = GENERATE(false, true);
  const auto sizes = GENERATE(std::vector<int64_t>{16, 4}, std::vector<int64_t>{3, 4}, std::vector<int64_t>{4, 1, 10});
  const auto w = ones_leaf({10, 4});
  FlatOptimizer adam(numbered({w}), kFollowingAdam);
  step_by_ones(adam, w, kFollowingAdam, from_grad);
  w.set_data(at::ones(sizes));
  const auto error = [&] {
    return message_of<InvalidArgument>([&] { step_by_ones(adam, w, kFollowingAdam, from_grad); });
  };
  CHECK(contains(error(), "parameter 'p0' has shape " + c10::str(w.sizes())));
  CHECK(contains(error(), "'exp_avg'"));
  CHECK(contains(error(), "[10, 4]"));
  CHECK(w.eq(1).all().item<bool>());
  if (GENERATE(false, true)) {
    adam.state().reset(0);
  } else {
    adam.state().set(0, 0, at::full(sizes, 0.5));
    CHECK(contains(error(), "'exp_avg_sq'"));
    adam.state().set(0, 1, at::full(sizes, 0.25));
  }
  step_by_ones(adam, w, kFollowingAdam, from_grad);
  CHECK(have_all_moved(w));
  CHECK(adam.state().tensor(0, 1).sizes() == w.sizes());
}

TEST_CASE("shapes are followed before a step, of what may be trained", "[optimizer]") {
  const std::vector<at::Tensor> list{ones_leaf({10, 4}), ones_leaf({10, 4})};
  FlatOptimizer adam(numbered(list), kFollowingAdam);
  adam.step({{at::ones({10, 4}), {}}, {at::ones({10, 4}), {}}}, kFollowingAdam, &kPlainScalars, /*keep=*/false);
  list[0].set_data(at::ones({16, 4}));
  CHECK_THROWS_AS(adam.follow_shapes(), InvalidArgument);
  list[0].requires_grad_(false);
  adam.follow_shapes();
  list[0].requires_grad_(true);
  adam.state().reset(0);
  adam.follow_shapes();
  CHECK(adam.state().entry(0).run.count == 64);
}

TEST_CASE("a master copy of another size than its parameter is refused, and dropped with its state", "[optimizer]") {
  const auto w = ones_leaf({10, 4}, at::kBFloat16);
  FlatOptimizer sgd(numbered({w}), kFollowingSgd);
  step_by_ones(sgd, w, kFollowingSgd, false);
  w.set_data(at::ones({16, 4}, at::kBFloat16));
  CHECK(contains(message_of<InvalidArgument>([&] { step_by_ones(sgd, w, kFollowingSgd, false); }), "'master'"));
  if (GENERATE(false, true)) {
    sgd.state().reset(0);
  } else {
    sgd.state().set_master(0, at::full({16, 4}, 1.001));
  }
  step_by_ones(sgd, w, kFollowingSgd, false);
  CHECK(have_all_moved(w));
  CHECK(sgd.state().tensor(0, StateEntry::kMaster).sizes() == w.sizes());
}

TEST_CASE("state that was changed in place to another shape or dtype is refused by name", "[optimizer]") {
  const auto w = ones_leaf({10, 4});
  FlatOptimizer adam(numbered({w}), kFollowingAdam);
  step_by_ones(adam, w, kFollowingAdam, false);
  const auto held = adam.state().tensor(0, 1);
  const auto values = held.clone();
  for (const auto& other : {at::zeros({1}), values.to(at::kDouble), values.t(), at::zeros({1}).expand({10, 4})}) {
    held.set_data(other);
    const auto error = message_of<InvalidArgument>([&] { step_by_ones(adam, w, kFollowingAdam, false); });
    CHECK(contains(error, "'exp_avg_sq'"));
    CHECK(contains(error, c10::str(other.sizes())));
  }
  held.set_data(values);
  const auto count = adam.state().entry(0).step;
  count.set_data(at::zeros({}, at::kDouble));
  CHECK(contains(message_of<InvalidArgument>([&] { step_by_ones(adam, w, kFollowingAdam, false); }), "'step'"));
  count.set_data(at::ones({}));
  step_by_ones(adam, w, kFollowingAdam, false);
}

TEST_CASE("a gradient that is older than its parameter's shape is refused", "[optimizer]") {
  const auto w = ones_leaf({10, 4});
  FlatOptimizer sgd(numbered({w}), kFollowingSgd);
  w.mutable_grad() = at::ones({10, 4});
  w.set_data(at::ones({3, 4}));
  CHECK_THROWS_AS(sgd.step_from_grad(kFollowingSgd), InvalidArgument);
  CHECK_THROWS_AS(sgd.step({{at::ones({10, 4}), {}}}, kFollowingSgd, &kPlainScalars, false), InvalidArgument);
  CHECK(w.eq(1).all().item<bool>());
}

TEST_CASE("runs of a shard follow the sizes of parameters that have no state", "[optimizer]") {
  constexpr auto kTile = static_cast<int64_t>(kernels::kTile);
  const std::vector<at::Tensor> list{ones_leaf({2 * kTile}), ones_leaf({2 * kTile}, at::kBFloat16)};
  FlatOptimizer adam(numbered(list), kFollowingAdam, {1, 2});
  list[0].set_data(at::ones({6 * kTile}));
  const auto gradients = [&] {
    std::vector<FlatGradient> sums;
    for (const auto& tensor : list) sums.push_back({at::ones(tensor.sizes()), {}});
    return sums;
  };
  adam.step(gradients(), kFollowingAdam, &kPlainScalars, false);
  const auto& state = adam.state();
  CHECK((state.entry(0).run.begin == 4 * kTile && state.entry(0).run.count == 2 * kTile));
  CHECK(state.entry(1).run.count == 2 * kTile);
  CHECK(state.tensor(1, StateEntry::kMaster).numel() == 2 * kTile);
  CHECK(have_all_moved(list[0].detach().narrow(0, 4 * kTile, 2 * kTile)));
  CHECK(list[0].detach().narrow(0, 0, 4 * kTile).eq(1).all().item<bool>());

  list[0].set_data(at::ones({2 * kTile}));
  const auto error =
      message_of<InvalidArgument>([&] { adam.step(gradients(), kFollowingAdam, &kPlainScalars, false); });
  CHECK(contains(error, "parameter 'p0' has shape [8192], and had [24576]"));
  CHECK_THROWS_AS(adam.state().set(0, 0, at::ones({2 * kTile})), InvalidArgument);
  for (size_t p = 0; p < 2; ++p) adam.state().reset(p);
  adam.step(gradients(), kFollowingAdam, &kPlainScalars, false);
  CHECK(state.entry(0).run.count == 0);
  CHECK(state.entry(1).run.count == 2 * kTile);
}

TEST_CASE("an entry that is erased takes a master copy with it", "[optimizer]") {
  const auto w = ones_leaf({10, 4}, at::kBFloat16);
  optim::SGD sgd({w}, torch::optim::SGDOptions(0.001));
  const auto step_by_hand = [&] {
    w.mutable_grad() = at::ones_like(w);
    sgd.step();
  };
  step_by_hand();
  w.set_data(at::ones({16, 4}, at::kBFloat16));
  CHECK_THROWS_AS(step_by_hand(), InvalidArgument);
  sgd.state().erase(w.unsafeGetTensorImpl());
  step_by_hand();
  // Each step is too small for the parameter, and ten are not.
  for (int i = 0; i < 9; ++i) step_by_hand();
  CHECK(have_all_moved(w));
}

TEST_CASE("an Adagrad whose parameter was resized starts anew from its initial value", "[optimizer]") {
  const auto w = ones_leaf({10, 4});
  optim::Adagrad adagrad({w}, torch::optim::AdagradOptions(0.05).initial_accumulator_value(0.5));
  w.mutable_grad() = at::ones_like(w);
  adagrad.step();
  w.set_data(at::ones({16, 4}));
  w.mutable_grad() = at::ones_like(w);
  adagrad.state().clear();
  adagrad.step();
  auto& state = static_cast<torch::optim::AdagradParamState&>(*adagrad.state().at(w.unsafeGetTensorImpl()));
  CHECK(state.sum().equal(at::full({16, 4}, 1.5)));
}
