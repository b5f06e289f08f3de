#include "server/protocol/plan.h"

#include <limits>
#include <map>
#include <vector>

#include "cpp/catch.h"
#include "kernels/kernels.h"
#include "muster/error.h"
#include "support/servers.h"

using namespace muster;
using namespace muster::server;

namespace {

const FlatGroups kGroups = std::vector<kernels::SgdGroup>(2);

int64_t numel_of(const ParameterSpec& spec) {
  int64_t numel = 1;
  for (const int64_t size : spec.sizes) numel *= size;
  return numel;
}

}  // namespace

TEST_CASE("every element is in one chunk, in registration order", "[server]") {
  for (const uint32_t servers : {1U, 2U, 3U, 7U, 40U}) {
    const auto plan = testing::small_plan(servers, 1, kGroups);
    std::map<int, int64_t> next;
    int parameter = 0, server = 0;
    for (const auto& chunk : cut_chunks(plan)) {
      CHECK(chunk.server >= server);
      server = chunk.server;
      CHECK(chunk.gradient_bytes() <= static_cast<int64_t>(plan.chunk_bytes));
      int64_t end = 0;
      for (const auto& piece : chunk.pieces) {
        CHECK(piece.parameter >= parameter);
        parameter = piece.parameter;
        CHECK(piece.run.begin == next[piece.parameter]);
        CHECK(piece.run.begin % static_cast<int64_t>(kernels::kTile) == 0);
        CHECK(piece.offset >= end);
        CHECK(piece.offset * static_cast<int64_t>(c10::elementSize(chunk.gradient)) % 64 == 0);
        CHECK(plan.parameters[static_cast<size_t>(piece.parameter)].dtype == chunk.dtype);
        end = piece.offset + piece.run.count;
        next[piece.parameter] += piece.run.count;
      }
      CHECK(end <= chunk.numel);
    }
    CHECK(server < static_cast<int>(servers));
    for (size_t p = 0; p < plan.parameters.size(); ++p) {
      CHECK(next[static_cast<int>(p)] == numel_of(plan.parameters[p]));
    }
  }
}

TEST_CASE("a parameter without elements has a piece of its own", "[server]") {
  Plan plan = testing::small_plan(2, 1, kGroups);
  plan.parameters = {{"a", {0, 3}, {3, 1}, at::kDouble}, {"b", {8}, {1}, at::kFloat}, {"c", {0}, {1}, at::kFloat}};
  plan.group_of = {0, 0, 0};
  std::map<int, int> pieces;
  for (const auto& chunk : cut_chunks(plan)) {
    CHECK(chunk.numel > 0);
    for (const auto& piece : chunk.pieces) {
      ++pieces[piece.parameter];
      CHECK(piece.run.begin == 0);
      CHECK(piece.run.count == (piece.parameter == 1 ? 8 : 0));
    }
  }
  CHECK(pieces == std::map<int, int>{{0, 1}, {1, 1}, {2, 1}});
}

TEST_CASE("shards are equal in bytes, up to a tile", "[server]") {
  Plan plan = testing::small_plan(3, 1, kGroups);
  plan.parameters = {{"a", {1'000'000}, {1}, at::kFloat}, {"b", {700'000}, {1}, at::kDouble}};
  plan.group_of = {0, 0};
  std::vector<int64_t> bytes(3);
  for (const auto& chunk : cut_chunks(plan)) {
    for (const auto& piece : chunk.pieces) {
      bytes[static_cast<size_t>(chunk.server)] +=
          piece.run.count * static_cast<int64_t>(c10::elementSize(chunk.gradient));
    }
  }
  const auto share = static_cast<double>(4'000'000 + 5'600'000) / 3;
  for (const int64_t own : bytes) CHECK(own == Approx(share).margin(kernels::kTile * 8));
}

TEST_CASE("a plan that no server can hold is refused", "[server]") {
  Plan good = testing::small_plan(2, 2, kGroups);
  good.tables = {{"rows", 100, 4, RowPlacement::modulo, {}, 1}, {"more", 1, 1, RowPlacement::range, {}, 0}};
  CHECK_NOTHROW(good.validate());
  const auto refused = [&](auto change) {
    Plan plan = good;
    change(plan);
    CHECK_THROWS_AS(plan.validate(), InvalidArgument);
  };
  refused([](Plan& plan) {
    plan.parameters.clear();
    plan.group_of.clear();
    plan.tables.clear();
  });
  refused([](Plan& plan) { plan.tables[1].name = "rows"; });
  refused([](Plan& plan) { plan.tables[0].num_rows = 0; });
  refused([](Plan& plan) { plan.tables[0].num_rows = kMaxRows + 1; });
  refused([](Plan& plan) { plan.tables[0].dim = 0; });
  refused([](Plan& plan) { plan.tables[0].dim = kMaxRowDim + 1; });
  refused([](Plan& plan) { plan.tables[0].group = 2; });
  refused([](Plan& plan) { plan.tables[0].placement = static_cast<RowPlacement>(2); });
  refused([](Plan& plan) { plan.tables[0].initialiser.kind = static_cast<RowInitialiser::Kind>(9); });
  refused([](Plan& plan) { plan.tables[0].initialiser.scale = -1; });
  refused([](Plan& plan) { plan.tables[0].initialiser.scale = std::numeric_limits<double>::infinity(); });
  refused([](Plan& plan) { std::get<1>(plan.groups)[1].momentum = 0.5; });
  refused([](Plan& plan) { plan.group_of.pop_back(); });
  refused([](Plan& plan) { plan.group_of[0] = 2; });
  refused([](Plan& plan) { plan.parameters[1].name = plan.parameters[0].name; });
  refused([](Plan& plan) { plan.parameters[0].dtype = at::kLong; });
  refused([](Plan& plan) { plan.parameters[0].dtype = static_cast<at::ScalarType>(-3); });
  refused([](Plan& plan) { plan.parameters[0].sizes = {int64_t{1} << 31, int64_t{1} << 33}; });
  refused([](Plan& plan) { plan.parameters[0].sizes = {-1, 1}; });
  refused([](Plan& plan) { plan.parameters[0].strides = {1}; });
  refused([](Plan& plan) { plan.servers = 0; });
  refused([](Plan& plan) { plan.workers = kMaxWorkers + 1; });
  refused([](Plan& plan) { plan.chunk_bytes = 1; });
  refused([](Plan& plan) { plan.groups = std::vector<kernels::AdamGroup>(); });
}

TEST_CASE("a plan may have tables alone", "[server]") {
  Plan plan;
  plan.tables = {{"rows", 100, 4, RowPlacement::modulo, {}, 0}};
  plan.groups = kGroups;
  CHECK_NOTHROW(plan.validate());
  CHECK(cut_chunks(plan).empty());
  CHECK(plan.describe_difference(plan).empty());
}

TEST_CASE("plans are compared in words, hyperparameters apart", "[server]") {
  Plan plan = testing::small_plan(2, 2, kGroups);
  plan.tables = {{"rows", 100, 4, RowPlacement::modulo, {}, 0}};
  Plan other = plan;
  std::get<1>(other.groups)[0].lr = 5;
  CHECK(plan.describe_difference(other).empty());
  other.parameters[0].sizes = {37, 12};
  CHECK_THAT(plan.describe_difference(other), ContainsSubstring("embed"));
  other = plan;
  other.groups = std::vector<kernels::AdamGroup>(2);
  CHECK_THAT(plan.describe_difference(other), ContainsSubstring("optimizers"));
  other = plan;
  other.staleness = 3;
  CHECK_THAT(plan.describe_difference(other), ContainsSubstring("staleness"));
  other = plan;
  other.tables[0].placement = RowPlacement::range;
  CHECK_THAT(plan.describe_difference(other), ContainsSubstring("'rows'"));
  other.tables.clear();
  CHECK_THAT(plan.describe_difference(other), ContainsSubstring("tables"));
}
