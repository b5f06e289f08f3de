// Which optimizers step together, by the parameters of a core.
#include "strategy/optimizer_sets.h"

#include <ATen/ops/zeros.h>

#include <string>

#include "cpp/catch.h"
#include "muster/error.h"
#include "strategy/build.h"
#include "strategy/registration.h"

using namespace muster;

namespace {

using Choice = OptimizerSets::Choice;
using Members = std::vector<OptimizerSets::Member>;

std::shared_ptr<StrategyCore> core_of(int parameters) {
  auto core = make_mirrored({"cpu"}, {}, Balance::equal, ReplicaThreads::own);
  NamedTensors named;
  for (int p = 0; p < parameters; ++p) named.emplace_back("p" + std::to_string(p), at::zeros({1}));
  add_module(core->session(), {{named}, {{}}});
  return core;
}

OptimizerSets::Resolve resolve_to(Members members) {
  return [members = std::move(members)] { return members; };
}

Members not_resolved() { throw std::logic_error("resolved again"); }

using Numbers = std::vector<int>;

}  // namespace

TEST_CASE("a choice of optimizers is resolved once, and when it looks otherwise", "[strategy][optimizer_sets]") {
  const auto core = core_of(3);
  OptimizerSets sets(core);
  const int set = sets.set_of({.optimizers = {0}, .look = {1}}, resolve_to({{{0}, true}}));
  CHECK(core->sets().set_of({0}) == set);
  CHECK(sets.set_of({.optimizers = {0}, .look = {1}}, not_resolved) == set);
  CHECK(sets.set_of({.optimizers = {0}, .look = {2}}, resolve_to({{{2, 0, 2}, true}})) == set);
  CHECK(core->sets().set_of({0, 2}) == set);
  CHECK(sets.set_of({.optimizers = {0}, .look = {2}}, not_resolved) == set);

  const int other = sets.set_of({.optimizers = {1}, .look = {1}}, resolve_to({{{1}, false}}));
  CHECK(other != set);
  CHECK(sets.numbers() == Numbers{set, other});
  CHECK(sets.is_fused(set));
  CHECK_FALSE(sets.is_fused(other));
}

TEST_CASE("a set is fused where all its optimizers are flat", "[strategy][optimizer_sets]") {
  const auto core = core_of(2);
  OptimizerSets sets(core);
  const auto fused = [&](uint64_t look, bool first, bool second) {
    return sets.is_fused(
        sets.set_of({.optimizers = {0, 1}, .look = {look}}, resolve_to({{{0}, first}, {{1}, second}})));
  };
  CHECK(fused(1, true, true));
  CHECK_FALSE(fused(2, true, false));
  CHECK_FALSE(fused(3, false, false));
}

TEST_CASE("a set without optimizers has all parameters, and nothing that steps", "[strategy][optimizer_sets]") {
  const auto core = core_of(2);
  OptimizerSets sets(core);
  const int set = sets.set_of({}, resolve_to({}));
  CHECK(core->sets().set_of({0, 1}) == set);
  CHECK(sets.optimizers_of(set).empty());
  CHECK_FALSE(sets.is_fused(set));
}

TEST_CASE("whatever is prepared stays one set, and optimizers by name do not", "[strategy][optimizer_sets]") {
  const auto core = core_of(2);
  OptimizerSets sets(core);
  const auto all = [](Numbers optimizers) {
    return Choice{.optimizers = std::move(optimizers), .is_whatever_is_prepared = true, .look = {}};
  };
  const int set = sets.set_of(all({0}), resolve_to({{{0}, true}}));
  CHECK(sets.set_of(all({0, 1}), resolve_to({{{0}, true}, {{1}, true}})) == set);
  CHECK(core->sets().set_of({0, 1}) == set);
  CHECK(sets.optimizers_of(set) == Numbers{0, 1});
  CHECK_THROWS_WITH(sets.set_of({.optimizers = {0}}, resolve_to({{{0}, true}}), /*may_share=*/false),
                    ContainsSubstring("'p0' is in two different sets"));
  CHECK(sets.set_of({.optimizers = {1, 0}}, resolve_to({{{1}, true}, {{0}, true}})) == set);
  CHECK(sets.optimizers_of(set) == Numbers{1, 0});
}

TEST_CASE("a set that several optimizers step in turn is stepped by the last one named", "[strategy][optimizer_sets]") {
  const auto core = core_of(1);
  OptimizerSets sets(core);
  const int set = sets.set_of({.optimizers = {0}}, resolve_to({{{0}, true}}));
  CHECK(sets.set_of({.optimizers = {1}}, resolve_to({{{0}, false}})) == set);
  CHECK(sets.optimizers_of(set) == Numbers{1});
  CHECK_FALSE(sets.is_fused(set));
  CHECK(sets.set_of({.optimizers = {0}}, not_resolved) == set);
  CHECK(sets.optimizers_of(set) == Numbers{0});
  CHECK(sets.is_fused(set));
  CHECK(sets.numbers() == Numbers{set});
}

TEST_CASE("a parameter of two optimizers that would step together is named", "[strategy][optimizer_sets]") {
  const auto core = core_of(2);
  OptimizerSets sets(core);
  const int set = sets.set_of({.optimizers = {0, 1}, .look = {1}}, resolve_to({{{0, 0}, true}, {{1}, true}}));
  CHECK_THROWS_WITH(sets.set_of({.optimizers = {0, 1}, .look = {2}}, resolve_to({{{0, 1}, true}, {{1}, true}})),
                    ContainsSubstring("'p1' belongs to two optimizers"));
  CHECK(core->sets().set_of({0, 1}) == set);
}

TEST_CASE("what cannot be resolved leaves a set as it was", "[strategy][optimizer_sets]") {
  const auto core = core_of(2);
  OptimizerSets sets(core);
  CHECK_THROWS_AS(sets.set_of({.optimizers = {0}}, not_resolved), std::logic_error);
  CHECK(sets.numbers().empty());
  const int set = sets.set_of({.optimizers = {0}, .look = {1}}, resolve_to({{{0}, true}}));
  CHECK_THROWS_AS(sets.set_of({.optimizers = {0}, .look = {2}}, not_resolved), std::logic_error);
  CHECK(sets.is_fused(set));
  CHECK(core->sets().set_of({0}) == set);
  CHECK(sets.set_of({.optimizers = {0}, .look = {1}}, not_resolved) == set);
}
