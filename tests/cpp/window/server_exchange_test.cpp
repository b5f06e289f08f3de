// What workers and the servers that hold their parameters exchange in a window.
#include "window/server_exchange.h"

#include <ATen/ops/tensor.h>

#include <array>

#include "cpp/catch.h"
#include "cpp/window/server_fixtures.h"
#include "muster/error.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::testing;

namespace {

struct Trainer {
  Trainer(const ServerJob& job, double value, int rank = 0, int workers = 1)
      : a(leaf(value)),
        b(leaf(value)),
        optimizer({{"a", a, 0}, {"b", b, 0}}, descent()),
        exchange(job, rank, workers, {},
                 {.names = {"a", "b"},
                  .tensors = {a, b},
                  .optimizer = &optimizer,
                  .position = {0, 1},
                  .group_of = {0, 0},
                  .rows = {nullptr, nullptr},
                  .groups = descent()}) {}

  // Opens a window whose sums all are `gradient`; without b's, nobody used that.
  void push(double gradient, bool uses_b = true) {
    exchange.open();
    exchange.take(1, at::full({4}, uses_b ? gradient : 0, at::kFloat));
    exchange.take(0, at::full({4}, gradient, at::kFloat));
  }

  at::Tensor a;
  at::Tensor b;
  FlatOptimizer optimizer;
  ServerExchange exchange;
};

}  // namespace

TEST_CASE("workers start from the chief's values, agree, and step by what all pushed", "[window]") {
  const OneServer server;
  CHECK(run_threads(2, [&](int rank) {
          Trainer worker(server.job(), rank == 0 ? 1 : 9, rank, 2);
          auto& exchange = worker.exchange;
          MUSTER_CHECK(is_all(worker.a, 1));
          MUSTER_CHECK(exchange.since() == 0);

          worker.push(rank + 1, /*uses_b=*/false);
          const auto tail = at::full({1}, 10 * (rank + 1), at::kDouble);
          const auto records = exchange.agree(tail, "of " + std::to_string(rank));
          MUSTER_CHECK(is_all(tail, 30));
          MUSTER_CHECK((records == std::vector<std::pair<uint32_t, std::string>>{{0, "of 0"}, {1, "of 1"}}));
          MUSTER_CHECK((exchange.members() == std::vector<uint32_t>{0, 1}));
          // Sums of 3, of one parameter: 4 * 9.
          MUSTER_CHECK(kernels::norm_total(exchange.norm_sum()) == 36);
          exchange.step(scalars_with(2), descent(), /*unused=*/{1});
          MUSTER_CHECK(is_all(worker.a, 1 - 0.5 * 1.5));
          MUSTER_CHECK(is_all(worker.b, 1));

          worker.push(100);
          exchange.agree(tail, {});
          exchange.skip();
          MUSTER_CHECK(is_all(worker.a, 1 - 0.5 * 1.5));
          MUSTER_CHECK(is_all(exchange.fetch(std::array{server::Part::parameter})[0][0], 1 - 0.5 * 1.5));
          MUSTER_CHECK(!exchange.has_lost());
        }).empty());
}

TEST_CASE("a worker whose plan differs hears how", "[window]") {
  const OneServer server;
  const Trainer chief(server.job(), 1, 0, 1);
  const auto parameter = leaf(1, 5);
  const FlatOptimizer optimizer({{"a", parameter, 0}}, descent());
  const ServerParameters given{.names = {"a"},
                               .tensors = {parameter},
                               .optimizer = &optimizer,
                               .position = {0},
                               .group_of = {0},
                               .rows = {nullptr},
                               .groups = descent()};
  CHECK_THROWS_AS(ServerExchange(server.job(), 0, 1, {}, given), LayoutMismatch);
}

TEST_CASE("a window does not open on parameters that servers do not know, nor after half of another", "[window]") {
  const OneServer server;
  Trainer worker(server.job(), 1);
  SECTION("a parameter was written") {
    worker.b.detach().fill_(3);
    const auto message = message_of<InvalidArgument>([&] { worker.exchange.open(); });
    CHECK_THAT(message, ContainsSubstring("parameter 'b' was written outside step()"));
  }
  SECTION("a window was cut short") {
    worker.push(1);
    CHECK_THROWS_AS(worker.exchange.open(), CommError);
  }
}

TEST_CASE("a worker that steps on its own agrees with nobody, and is dealt each batch once", "[window]") {
  const OneServer server(server::kAnyStaleness);
  Trainer worker(server.job(), 1);
  auto& exchange = worker.exchange;
  CHECK_FALSE(exchange.plan().is_synchronous());
  const auto first = exchange.deal(0, 0, 2, {});
  const auto second = exchange.deal(0, 0, 2, {});
  CHECK(first.state == server::Dealt::State::dealt);
  CHECK(first.batch + second.batch == 1);
  worker.push(1);
  exchange.note_batches({{0, 0, first.batch}, {0, 0, second.batch}});
  exchange.step(scalars_with(1), descent(), {});
  CHECK(is_all(worker.a, 0.5));
  CHECK(exchange.deal(0, 0, 2, {}).state == server::Dealt::State::ended);
}
