// Stand-ins for what parameter servers write of a checkpoint.
#include "window/server_cut.h"

#include <ATen/ops/scalar_tensor.h>

#include <string>
#include <vector>

#include "cpp/catch.h"
#include "muster/error.h"

using namespace muster;
using server::Part;

namespace {

server::Plan plan_of_two() {
  server::Plan plan;
  plan.parameters = {{"weight", {4, 3}, {3, 1}, at::kBFloat16}, {"turned", {4, 3}, {1, 4}, at::kDouble}};
  plan.group_of = {0, 0};
  plan.tables = {{"rows", 100, 3, RowPlacement::modulo, {}, 0}, {"dense", 100, 3, RowPlacement::modulo, {}, 0}};
  plan.groups = std::vector<kernels::AdamGroup>(1, {.01, .9, .99, 1e-8, 0, false, false, false});
  plan.servers = 2;
  return plan;
}

constexpr uint8_t kStatesAndMaster = 1 | 2 | 8;

}  // namespace

TEST_CASE("stand-ins have the dtypes and sizes of what they stand for, and are known again", "[window][saving]") {
  const auto plan = plan_of_two();
  const server::WritePart request{5, 7, "/draft", {1}, {}, {0}};
  const server::WritesPart first{{{0, kStatesAndMaster, 3}, {1, 3, 3}}, {{10, 4}, {1, 1}}};
  const server::WritesPart second{{{0, kStatesAndMaster, 3}}, {{20, 3}, {1, 1}}};
  const ServerCut cut(plan, request, {first, second});
  CHECK(cut.writers() == std::vector<std::string>{"server-0-7", "server-1-7"});

  const auto weight = cut.part(0, Part::parameter);
  CHECK(weight.is_meta());
  CHECK(weight.scalar_type() == at::kBFloat16);
  CHECK(weight.sizes() == at::IntArrayRef({4, 3}));
  CHECK(cut.part(0, Part::master).scalar_type() == at::kFloat);
  CHECK(cut.part(0, Part::steps).item<float>() == 3);
  CHECK_FALSE(cut.part(0, Part::state2).defined());
  CHECK(cut.name_of(weight.detach()) == "parameter/weight");
  CHECK(cut.name_of(cut.part(0, Part::state1)) == "state1/weight");
  CHECK_FALSE(cut.name_of(weight.clone()));
  CHECK_FALSE(cut.name_of(at::scalar_tensor(1.0)));

  CHECK(cut.is_left(1));
  CHECK_FALSE(cut.part(1, Part::parameter).defined());
  CHECK(cut.part(1, Part::steps).item<float>() == 3);

  const auto rows = cut.contents(0);
  CHECK(rows.rows.sizes() == at::IntArrayRef({30}));
  CHECK(rows.steps == 3);
  CHECK(cut.name_of(rows.rows) == "rows/rows");
  CHECK(cut.name_of(rows.values) == "row_values/rows");
  CHECK(cut.name_of(rows.states.narrow(1, 0, 3)) == "row_states/0/rows");
  CHECK(cut.name_of(rows.states.narrow(1, 3, 3)) == "row_states/1/rows");
  CHECK_THROWS(cut.contents(1));
}

TEST_CASE("a server that refuses is named", "[window][saving]") {
  const auto plan = plan_of_two();
  const server::WritePart request{5, 7, "/draft", {}, {}, {0, 1}};
  const server::WritesPart first{{{0, 3, 1}}, {{10, 4}, {1, 1}}};
  const ServerCut cut(plan, request, {first, {.refusal = "the folder is not seen"}});
  CHECK(cut.refusal() == "parameter server 1: the folder is not seen");
  CHECK(ServerCut(plan, request, {first, first}).refusal().empty());
}

TEST_CASE("servers that contradict each other are refused", "[window][saving]") {
  const auto plan = plan_of_two();
  const server::WritePart request{5, 7, "/draft", {}, {}, {0, 1}};
  const std::vector<server::PartOfTable> tables(2);
  CHECK_THROWS_WITH(ServerCut(plan, request, {{{{0, 3, 1}}, tables}, {{{0, 0, 0}}, tables}}),
                    ContainsSubstring("'weight' was stepped for the first time"));
  CHECK_THROWS_AS(ServerCut(plan, request, {{{{2, 3, 1}}, tables}}), CommError);
  CHECK_THROWS_AS(ServerCut(plan, request, {{{{0, 3, 1}}, {}}}), CommError);
}

TEST_CASE("what lies in row-major order", "[window]") {
  CHECK(is_row_major({4, 3}, {3, 1}));
  CHECK(is_row_major({}, {}));
  CHECK(is_row_major({4, 1, 3}, {3, 99, 1}));
  CHECK_FALSE(is_row_major({4, 3}, {1, 4}));
  CHECK_FALSE(is_row_major({4, 3}, {6, 2}));
}
