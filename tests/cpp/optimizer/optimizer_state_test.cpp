#include "optimizer/optimizer_state.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "cpp/catch.h"
#include "muster/error.h"
#include "optimizer/flat_optimizer.h"

using namespace muster;

namespace {

const FlatGroups kAdam = std::vector<kernels::AdamGroup>(1);

OptimizerState state_of(const std::vector<at::Tensor>& parameters, const Shard& shard = {}) {
  std::vector<FlatParameter> flat;
  for (const auto& tensor : parameters) flat.push_back({"p" + std::to_string(flat.size()), tensor});
  return {std::move(flat), kAdam, shard};
}

}  // namespace

TEST_CASE("a step that began counts, and one that is taken back does not", "[optimizer]") {
  auto state = state_of({at::ones({3}), at::ones({2})});
  state.begin_step(0, 2);
  CHECK(state.step_counts() == std::vector<float>{1, 0});
  CHECK(state.take_started() == std::vector<size_t>{0});
  state.begin_step(0, 3);  // one more state tensor
  CHECK(state.take_started() == std::vector<size_t>{0});
  state.begin_step(0, 3);
  CHECK(state.take_started().empty());
  state.take_back_step(0);
  CHECK(state.step_counts() == std::vector<float>{2, 0});
  CHECK(state.tensor(0, 2).equal(at::zeros({3})));
}

TEST_CASE("a parameter's state is replaced, and dropped", "[optimizer]") {
  auto state = state_of({at::ones({2, 3}), at::ones({2, 3}, at::kBFloat16)});
  state.set(0, 1, at::full({2, 3}, 4));
  CHECK(state.entry(0).num_states == 2);
  CHECK(state.entry(0).started);
  CHECK(state.tensor(0, 0).equal(at::zeros({2, 3})));
  CHECK(state.tensor(0, 1).equal(at::full({2, 3}, 4.0F)));
  CHECK_THROWS_AS(state.set(0, 1, at::full({3}, 4)), InvalidArgument);
  CHECK_FALSE(state.tensor(0, StateEntry::kMaster).defined());
  state.set_master(1, at::full({2, 3}, 1.001));
  CHECK(state.tensor(1, StateEntry::kMaster).equal(at::full({2, 3}, 1.001F)));
  state.set_step_count(0, 7);
  CHECK(state.step_counts() == std::vector<float>{7, 0});
  state.reset(0);
  CHECK_FALSE(state.tensor(0, 1).defined());
  CHECK_FALSE(state.entry(0).started);
  CHECK(state.step_counts() == std::vector<float>{0, 0});
}

TEST_CASE("a master copy is what does not round to the parameter, and of a wide one nothing", "[optimizer]") {
  const auto master = at::tensor({1.001F, 2.002F, -0.0F, 4.0F}).view({4, 1});
  auto low = master.to(at::kBFloat16);
  CHECK(current_master(master, low).is_same(master));
  low[1] = 3;
  low[2] = 0;
  const auto expected = at::tensor({1.001F, 3.0F, 0.0F, 4.0F}).view({4, 1});
  CHECK(current_master(master, low).view(at::kInt).equal(expected.view(at::kInt)));
  const auto wide = at::tensor({5.0, 6.0, 7.0, 8.0}, at::kDouble).view({4, 1});
  CHECK(current_master(master, wide).equal(wide.to(at::kFloat)));
}

TEST_CASE("state moves to common memory once, the owner's values with it, and back", "[optimizer]") {
  auto state = state_of({at::ones({100}), at::ones({0}), at::ones({3})});
  state.set(0, 0, at::arange(100));
  CHECK(state.standing(0).has_own_state);
  const std::vector<size_t> parameters{0, 1};
  const std::vector<size_t> num_states{2, 2};
  const auto parts = state.common_parts(parameters, num_states, state.runs_for(undivided(1)));
  REQUIRE(parts.size() == 1);
  const int64_t bytes = parts[0].bytes;
  CHECK(bytes == 2 * 448);  // of 100 floats, in multiples of 64 bytes
  const auto memory = at::zeros({bytes}, at::kByte);
  const auto moved = state.move_to_common(parameters, num_states, memory, {{{10, 20}, {}, {}}});
  REQUIRE(moved.size() == 2);
  CHECK(moved[0].const_data_ptr() == memory.const_data_ptr());
  CHECK(state.tensor(0, 0).is_same(moved[0]));
  CHECK(state.tensor(0, 0).sum().item<double>() == 20 * 19.5);  // elements 10 to 29; another process has the others
  CHECK(state.common_parts(parameters, num_states, state.runs_for(undivided(1))).empty());
  CHECK_FALSE(state.standing(0).has_own_state);
  state.leave_common(0);
  CHECK_FALSE(state.tensor(0, 0).is_same(moved[0]));
  CHECK(state.tensor(0, 0).equal(moved[0]));
  CHECK(state.standing(0).has_own_state);
}

TEST_CASE("parts of common memory lie with those who own them", "[optimizer]") {
  constexpr auto kTile = static_cast<int64_t>(kernels::kTile);
  auto state = state_of({at::ones({3 * kTile}), at::ones({5}), at::ones({0}), at::ones({kTile})});
  const auto runs = state.runs_for(undivided(2));
  const std::vector<size_t> all{0, 1, 2, 3};
  const auto parts = state.common_parts(all, {2, 2, 2, 2}, runs);
  const int64_t small = 64;
  REQUIRE(parts.size() == 2);
  CHECK((parts[0].share == 0 && parts[0].bytes == 2 * 3 * kTile * 4));
  CHECK((parts[1].share == 1 && parts[1].bytes == 2 * small + 2 * kTile * 4));
  // Each of the first parameter's two tensors is cut among three shares.
  const auto cut = state.common_parts({0}, {2}, state.runs_for(undivided(5)));
  REQUIRE(cut.size() == 6);
  for (size_t i = 0; i < cut.size(); ++i) CHECK((cut[i].share == i % 3 && cut[i].bytes == kTile * 4));
  CHECK(state.common_parts({}, {}, runs).empty());
}

TEST_CASE("steps of SGD before it has momentum do not count for its first buffer", "[optimizer]") {
  const auto w = at::ones({4}).requires_grad_();
  const kernels::StepScalars one{.divisor = 1, .clip = 1, .norm = 0, .unit = 1, .finite = 1, .dropped = 0};
  const auto groups = [](double momentum) {
    return FlatGroups(std::vector<kernels::SgdGroup>{{0.125, momentum, 0.5, 0, false, false}});
  };
  FlatOptimizer sgd({{"w", w}}, groups(0));
  for (int step = 0; step < 2; ++step) sgd.step({{at::ones({4}), {}}}, groups(0), &one, false);
  sgd.step({{at::ones({4}), {}}}, groups(0.5), &one, false);
  CHECK(sgd.state().tensor(0, 0).equal(at::ones({4})));  // undampened, as the first of all
  sgd.step({{at::ones({4}), {}}}, groups(0.5), &one, false);
  CHECK(sgd.state().tensor(0, 0).equal(at::ones({4})));
}

TEST_CASE("a shard keeps its run of each state tensor", "[optimizer]") {
  const std::vector<at::Tensor> parameters{at::ones({2 * static_cast<int64_t>(kernels::kTile)})};
  auto state = state_of(parameters, {1, 2});
  CHECK(state.runs_for(undivided(2))[1][0].count == state.entry(0).run.count);
  state.set(0, 0, at::arange(parameters[0].numel()));
  REQUIRE(state.tensor(0, 0).numel() == state.entry(0).run.count);
  CHECK(state.tensor(0, 0)[0].item<int64_t>() == state.entry(0).run.begin);
  parameters[0].set_data(parameters[0].to(at::kDouble));
  CHECK_THROWS_AS(state.follow(0), InvalidArgument);
}
