// Rows of embeddings that are on servers alone.
#include "window/embedding_rows.h"

#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/tensor.h>

#include <array>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "cpp/catch.h"
#include "cpp/window/server_fixtures.h"
#include "embedding/row_source.h"

using namespace muster;
using namespace muster::testing;

namespace {

constexpr int64_t kRows = 6;

// A worker whose weight has one row that its initialiser would not give.
struct Table {
  Table()
      : weight(initial_rows(kRows)),
        plan(plan_of({}, {{.name = "table", .num_rows = kRows, .dim = 2, .initialiser = some_rows().initialiser}},
                     descent())),
        client(config_of(server.servers.names, 0, plan)),
        rows(client, in_step, plan) {
    weight[3].fill_(9);
    before = weight.clone();
  }

  void connect() {
    rows.add(weight, 0);
    const FlatOptimizer optimizer({{"table", before, 0}}, descent());
    client.start([&] { rows.give(optimizer); });
    client.join();
    rows.read_after(0);
    rows.leave();
  }

  at::Tensor weight;
  at::Tensor before;
  OneServer server;
  server::Plan plan;
  server::ServerClient client;
  std::mutex in_step;
  RowsOnServers rows;
};

}  // namespace

TEST_CASE("a weight leaves a stub, which servers answer for, and comes back", "[window]") {
  Table table;
  table.connect();
  CHECK(table.client.rows().fetch(0, 0).rows == std::vector<int64_t>{3});  // others are what they are at first
  CHECK(is_row_stub(table.weight));
  const auto pulled = pull_rows(table.weight, at::tensor({5, 3, 3}, at::kLong));
  REQUIRE(pulled);
  CHECK(pulled->rows.detach().equal(table.before.index_select(0, at::tensor({3, 5}, at::kLong))));
  CHECK(whole_rows(table.weight).equal(table.before));
  CHECK(table.rows.was_here(0));
  CHECK_FALSE(table.rows.was_written(0));
  table.rows.bring_back();
  CHECK(table.weight.equal(table.before));
  CHECK(table.rows.was_written(0));
}

TEST_CASE("a weight that had no rows here gets none", "[window]") {
  Table table;
  table.weight = make_row_stub(kRows, 2);
  table.connect();
  CHECK_FALSE(table.rows.was_here(0));
  table.rows.bring_back();
  CHECK(is_row_stub(table.weight));
  CHECK(table.rows.fetch(0, std::array{server::Part::parameter})[0].equal(initial_rows(kRows)));
}

TEST_CASE("rows that are pushed are stepped, and no others", "[window]") {
  Table table;
  table.connect();
  const auto rows = at::tensor({1, 3}, at::kLong).view({1, 2});
  const auto sums = at::sparse_coo_tensor(rows, at::full({2, 2}, 4.0F), {kRows, 2}).coalesce();
  table.rows.push(1, 0, sums);
  table.client.flush();
  const auto decision = table.client.commit(1, {});
  table.client.sum(1, decision.members);
  server::Apply apply;
  apply.step = 1;
  apply.members = decision.members;
  apply.groups = descent();
  table.client.apply(apply);
  table.rows.read_after(1);
  const auto expected = table.before - 0.5 * sums.to_dense();
  const auto parts =
      table.rows.fetch(0, std::array{server::Part::steps, server::Part::state0, server::Part::parameter});
  CHECK(parts[0].item<float>() == 1);
  CHECK_FALSE(parts[1].defined());
  CHECK(parts[2].equal(expected));
}

TEST_CASE("all states of a table travel at once", "[window]") {
  const FlatGroups adam = std::vector<kernels::AdamGroup>{{.01, .9, .99, 1e-8, 0, false, true, false}};
  const OneServer server;
  const auto plan = plan_of({}, {{.name = "table", .num_rows = kRows, .dim = 2}}, adam);
  server::ServerClient client(config_of(server.servers.names, 0, plan));
  std::mutex in_step;
  RowsOnServers rows(client, in_step, plan);
  rows.add(initial_rows(kRows), 0);
  const std::vector<int64_t> touched = {1, 4};
  const std::vector<float> values(4, 7), states = {1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6};
  client.start([&] { client.rows().write(0, touched, values, states); });
  client.join();
  rows.read_after(0);
  // Of many, so that a few signs of life among them do not count.
  constexpr uint64_t kTimes = 50;
  const auto requests_of = [&](std::span<const server::Part> which) {
    const auto before = server.servers.running[0]->stats().requests;
    for (uint64_t i = 0; i < kTimes; ++i) rows.fetch(0, which);
    return server.servers.running[0]->stats().requests - before;
  };
  const std::array all = {server::Part::state2, server::Part::state0, server::Part::state1};
  const auto requests = requests_of(all);
  CHECK((requests >= kTimes && requests < 2 * kTimes));
  CHECK(requests_of(std::array{server::Part::master}) < kTimes);
  const auto parts = rows.fetch(0, all);
  const std::array<std::array<float, 2>, 3> expected = {{{3, 6}, {1, 4}, {2, 5}}};
  for (size_t i = 0; i < 3; ++i) {
    auto whole = at::zeros({kRows, 2});
    for (size_t row = 0; row < 2; ++row) whole[touched[row]].fill_(expected[i][row]);
    CHECK(parts[i].equal(whole));
  }
}
