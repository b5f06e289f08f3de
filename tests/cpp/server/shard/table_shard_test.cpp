#include "server/shard/table_shard.h"

#include <sys/stat.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "cpp/catch.h"
#include "kernels/kernels.h"
#include "muster/error.h"
#include "net/unix_socket.h"
#include "server/shard/server.h"
#include "server/worker/client.h"
#include "support/connections.h"
#include "support/folder.h"
#include "support/run_ranks.h"
#include "support/servers.h"

using namespace muster;
using namespace muster::server;
using testing::config_of;
using testing::Servers;

namespace {

using Rows = std::vector<int64_t>;
using Floats = std::vector<float>;
using Ranks = std::vector<uint32_t>;

FlatGroups two_sgd_groups() {
  return std::vector<kernels::SgdGroup>{{.5, 0, 0, 0, false, false}, {.25, 0, 0, 0, false, true}};
}
FlatGroups two_adagrad_groups() {
  return std::vector<kernels::AdagradGroup>{{.1, .01, 1e-10, 0, false}, {.2, 0, 1e-9, 0, true}};
}
FlatGroups two_adam_groups() {
  return std::vector<kernels::AdamGroup>{{.01, .9, .99, 1e-8, .1, true, true, false},
                                         {.02, .8, .98, 1e-8, 0, false, false, false}};
}

// Tables alone; one has many stripes, one has rows of several tiles.
Plan table_plan(uint32_t servers, uint32_t workers, const FlatGroups& groups, RowPlacement placement) {
  Plan plan;
  plan.tables = {{"users", 10'000'000, 5, placement, {RowInitialiser::Kind::normal, 1, 3}, 0},
                 {"items", 11, static_cast<int64_t>(kernels::kTile) + 7, placement, {}, 1},
                 {"users/values", 64, 1, placement, {RowInitialiser::Kind::uniform, .5, 4}, 0}};
  plan.groups = groups;
  plan.servers = servers;
  plan.workers = workers;
  plan.timeout_ms = 60'000;
  return plan;
}

// Some rows are everybody's, some one rank's; now and then a rank has none.
Rows rows_of(const TableSpec& table, uint32_t rank, uint64_t step) {
  if ((rank + step) % 4 == 0) return {};
  std::set<int64_t> rows;
  for (uint64_t i = 0; i < 9; ++i) {
    const uint64_t common = (step * 31 + i * 7919) % static_cast<uint64_t>(table.num_rows);
    rows.insert(
        static_cast<int64_t>(i % 3 == 0 ? common : (common + rank * i) % static_cast<uint64_t>(table.num_rows)));
  }
  return {rows.begin(), rows.end()};
}

Floats gradients_of(const TableSpec& table, const Rows& rows, uint32_t rank, uint64_t step) {
  Floats values;
  for (const int64_t row : rows) {
    for (int64_t i = 0; i < table.dim; ++i) {
      values.push_back(std::sin(static_cast<float>(row % 1000 * 3 + i) * .7F + static_cast<float>(rank * 5 + step)));
    }
  }
  return values;
}

Apply command_of(const Plan& plan, uint64_t step, const Ranks& members) {
  Apply command;
  command.step = step;
  command.members = members;
  command.groups = plan.groups;
  command.scalars.divisor = 3;
  command.scalars.clip = step % 2 == 0 ? .5 : 1;
  if (step == 3) command.unused_tables = {1};
  if (step == 4) command.scalars.finite = 0;
  return command;
}

// Every table whole, in one place.
struct Reference {
  explicit Reference(const Plan& plan) : plan(plan), counted(plan.tables.size()) {
    for (const auto& spec : plan.tables) tables.push_back(empty_table(spec, plan.groups));
  }

  /// Returns the norm of the sums.
  kernels::NormSum step(const Apply& command) {
    kernels::NormSum norm;
    for (size_t t = 0; t < tables.size(); ++t) {
      const auto& spec = plan.tables[t];
      const auto dim = static_cast<size_t>(spec.dim);
      std::map<int64_t, std::vector<Floats>> given;  // by row, by rank
      for (const uint32_t rank : command.members) {
        const Rows rows = rows_of(spec, rank, command.step);
        const Floats values = gradients_of(spec, rows, rank, command.step);
        for (size_t i = 0; i < rows.size(); ++i) {
          auto& of_row = given[rows[i]];
          of_row.resize(command.members.back() + 1);
          of_row[rank].assign(values.begin() + static_cast<ptrdiff_t>(i * dim),
                              values.begin() + static_cast<ptrdiff_t>((i + 1) * dim));
        }
      }
      Rows rows;
      Floats sums;
      for (const auto& [row, of_row] : given) {
        std::vector<const void*> sources;
        for (const auto& values : of_row) sources.push_back(values.empty() ? nullptr : values.data());
        Floats sum(dim);
        void* destination = sum.data();
        kernels::tree_reduce(kernels::DType::f32, kernels::Reduction::sum, sources.data(),
                             static_cast<int>(sources.size()), &destination, 1, dim);
        rows.push_back(row);
        sums.insert(sums.end(), sum.begin(), sum.end());
        std::vector<double> of_sum(kernels::num_tiles(dim));
        const kernels::StatsSegment segment{sum.data(), of_sum.data(), dim, kernels::DType::f32};
        kernels::grad_stats(&segment, 1);
        for (const double partial : of_sum) kernels::add_partial(norm, partial, 2);
      }
      const bool is_unused = std::binary_search(command.unused_tables.begin(), command.unused_tables.end(), t);
      if (is_unused || command.scalars.finite == 0) continue;
      ++counted[t];
      tables[t].push(rows, sums, row_optimizer_of(spec, command.groups), static_cast<int64_t>(counted[t]),
                     command.scalars);
    }
    return norm;
  }

  TableRows rows_of_table(size_t t) const {
    const auto& table = tables[t];
    const auto size = static_cast<size_t>(table.size());
    const auto dim = static_cast<size_t>(table.dim());
    const auto width = static_cast<size_t>(table.state_width());
    TableRows all{Rows(size), Floats(size * dim), Floats(size * width), counted[t]};
    table.export_rows(0, all.rows, all.values, all.states);
    TableRows sorted = all;
    std::sort(sorted.rows.begin(), sorted.rows.end());
    for (size_t i = 0; i < size; ++i) {
      const auto at =
          static_cast<size_t>(std::find(all.rows.begin(), all.rows.end(), sorted.rows[i]) - all.rows.begin());
      std::copy_n(all.values.data() + at * dim, dim, sorted.values.data() + i * dim);
      std::copy_n(all.states.data() + at * width, width, sorted.states.data() + i * width);
    }
    return sorted;
  }

  Plan plan;
  std::vector<RowTable> tables;
  std::vector<uint64_t> counted;
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

bool same(const TableRows& a, const TableRows& b) {
  return a.rows == b.rows && same_bits(a.values, b.values) && same_bits(a.states, b.states) && a.steps == b.steps;
}

ClientConfig patient(ClientConfig config) {
  config.patience = std::chrono::milliseconds(20'000);
  return config;
}

struct TableWorker {
  TableWorker(const std::vector<std::string>& names, uint32_t rank, const Plan& plan, bool shares = true)
      : plan(plan), rank(rank), client(patient(config_of(names, rank, plan, shares))) {}

  uint64_t join() {
    if (rank == 0 && !client.is_started()) client.start([] {});
    return client.join();
  }

  void push(uint64_t step) {
    for (uint32_t t = 0; t < plan.tables.size(); ++t) {
      const Rows rows = rows_of(plan.tables[t], rank, step + shift);
      client.rows().push(step, t, rows, gradients_of(plan.tables[t], rows, rank, step + shift));
    }
    client.flush();
  }

  /// Returns the norm of the sums.
  kernels::NormSum step(uint64_t step) {
    push(step);
    const auto members = client.commit(step, {1}).members;
    const auto norm = client.sum(step, members);
    auto command = command_of(plan, step + shift, members);
    command.step = step;
    client.apply(command);
    return norm;
  }

  Plan plan;
  uint32_t rank;
  ServerClient client;
  uint64_t shift = 0;  // what it pushes is that of so many steps later
};

// What a worker sees is what the reference has, down to the bits.
void check_same(TableWorker& worker, const Reference& expected, uint64_t step) {
  for (uint32_t t = 0; t < expected.tables.size(); ++t) {
    const auto& table = expected.tables[t];
    const auto known = expected.rows_of_table(t);
    Rows rows = known.rows;
    std::reverse(rows.begin(), rows.end());
    rows.insert(rows.end(), {1, 0, 1});
    Floats values(rows.size() * static_cast<size_t>(table.dim())), wanted(values.size());
    worker.client.rows().pull(t, step, rows, values);
    table.pull(rows, wanted);
    MUSTER_CHECK(same_bits(values, wanted));
    MUSTER_CHECK(worker.client.rows().state_width(t) == table.state_width());
    MUSTER_CHECK(same(worker.client.rows().fetch(t, step), known));
  }
}

void cut_all_connections() {
  for (const int connection : testing::connections()) testing::cut(connection);
}

}  // namespace

TEST_CASE("rows on any number of servers have the bits of one table", "[server]") {
  for (const auto& groups : {two_sgd_groups(), two_adagrad_groups(), two_adam_groups()}) {
    for (const auto placement : {RowPlacement::modulo, RowPlacement::range}) {
      for (const uint32_t servers : {1U, 2U, 3U}) {
        for (const Ranks& ranks : {Ranks{0}, Ranks{0, 1}, Ranks{0, 1, 2}, Ranks{0, 2, 5}}) {
          // Ranks that are not awaited must be there before the first step.
          const bool is_awaited = ranks.back() + 1 == ranks.size();
          const Plan plan =
              table_plan(servers, is_awaited ? static_cast<uint32_t>(ranks.size()) : 1, groups, placement);
          const Servers running(testing::server_names(servers));
          const auto size = static_cast<int>(ranks.size());
          std::barrier joined(size);
          const std::string failures = testing::run_threads(size, [&](int index) {
            const uint32_t rank = ranks[static_cast<size_t>(index)];
            TableWorker worker(running.names, rank, plan, (servers + rank) % 2 == 0);
            worker.join();
            joined.arrive_and_wait();
            Reference expected(plan);
            for (uint64_t step = 1; step <= 6; ++step) {
              const auto norm = worker.step(step);
              MUSTER_CHECK(norm == expected.step(command_of(plan, step, ranks)));
              if (step % 3 == 0) check_same(worker, expected, step);
              joined.arrive_and_wait();
            }
            worker.client.leave();
          });
          CAPTURE(groups.index(), placement, servers, ranks);
          CHECK(failures == "");
          for (const auto& server : running.running) {
            CHECK(server->stats().held_bytes == 0);
            CHECK(server->stats().duplicates == 0);
          }
        }
      }
    }
  }
}

TEST_CASE("a table goes on from rows that were fetched, on other servers", "[server]") {
  const Plan plan = table_plan(2, 1, two_adam_groups(), RowPlacement::modulo);
  const Servers running(testing::server_names(2));
  TableWorker worker(running.names, 0, plan);
  worker.join();
  Reference expected(plan);
  for (uint64_t step = 1; step <= 5; ++step) {
    worker.step(step);
    expected.step(command_of(plan, step, {0}));
  }
  Plan other = plan;
  other.servers = 3;
  for (auto& table : other.tables) table.placement = RowPlacement::range;
  const Servers others(testing::server_names(3));
  TableWorker copy(others.names, 0, other);
  for (uint32_t t = 0; t < plan.tables.size(); ++t) {
    const auto rows = worker.client.rows().fetch(t, 5);
    CHECK(rows.steps == expected.counted[t]);
    copy.client.rows().write(t, rows.rows, rows.values, rows.states);
    copy.client.rows().write_steps(t, rows.steps);
  }
  copy.join();
  copy.shift = 5;
  copy.step(1);
  expected.step(command_of(plan, 6, {0}));
  check_same(copy, expected, 1);
}

TEST_CASE("a push of rows larger than a frame travels in parts", "[server]") {
  constexpr int64_t kCount = 300'000, kDim = 14;
  for (const bool shares : {true, false}) {
    Plan plan = table_plan(2, 2, two_sgd_groups(), RowPlacement::modulo);
    plan.tables = {{"large", 2 * kCount, kDim, RowPlacement::modulo, {RowInitialiser::Kind::normal, 0, 0}, 0}};
    const Servers running(testing::server_names(2));
    const std::string failures = testing::run_threads(2, [&](int rank) {
      TableWorker worker(running.names, static_cast<uint32_t>(rank), plan, shares);
      worker.join();
      // Neighbours overlap in halves: some rows are both workers'.
      Rows rows(kCount);
      std::iota(rows.begin(), rows.end(), rank * kCount / 2);
      Floats gradients;
      for (const int64_t row : rows) {
        for (int64_t i = 0; i < kDim; ++i) gradients.push_back(static_cast<float>(row % 97 + i));
      }
      auto& client = worker.client;
      client.rows().push(1, 0, rows, gradients);
      client.flush();
      const auto members = client.commit(1, {1}).members;
      const auto norm = client.sum(1, members);
      kernels::NormSum expected;
      Apply command;
      command.step = 1;
      command.members = members;
      command.groups = plan.groups;
      client.apply(command);
      Rows wanted(2 * kCount);
      std::iota(wanted.rbegin(), wanted.rend(), 0);
      Floats values(wanted.size() * kDim);
      client.rows().pull(0, 1, wanted, values);
      const auto fetched = client.rows().fetch(0, 1);
      MUSTER_CHECK(fetched.rows.size() == kCount * 3 / 2);
      for (size_t i = 0; i < wanted.size(); ++i) {
        const int64_t row = wanted[i];
        const float pushers = row >= kCount * 3 / 2 ? 0 : row < kCount / 2 || row >= kCount ? 1 : 2;
        double squares = 0;
        for (int64_t d = 0; d < kDim; ++d) {
          const float sum = pushers * static_cast<float>(row % 97 + d);
          squares += static_cast<double>(sum) * static_cast<double>(sum);
          MUSTER_CHECK(values[i * kDim + static_cast<size_t>(d)] == -sum * .5F);
        }
        if (pushers == 0) continue;
        const auto place = static_cast<size_t>(row);
        MUSTER_CHECK(fetched.rows[place] == row);
        MUSTER_CHECK(fetched.values[place * kDim + 1] == -pushers * static_cast<float>(row % 97 + 1) * .5F);
        kernels::add_partial(expected, squares, 2);
      }
      MUSTER_CHECK(norm == expected);
    });
    CAPTURE(shares);
    CHECK(failures == "");
  }
}

TEST_CASE("rows count once over lost connections", "[server]") {
  for (const uint32_t staleness : {0U, kAnyStaleness}) {
    for (const bool shares : {true, false}) {
      Plan plan = table_plan(2, 1, two_adagrad_groups(), RowPlacement::modulo);
      plan.staleness = staleness;
      const Servers running(testing::server_names(2));
      TableWorker worker(running.names, 0, plan, shares);
      worker.join();
      Reference expected(plan);
      for (uint64_t step = 1; step <= 8; ++step) {
        worker.push(step);
        cut_all_connections();
        const auto command = command_of(plan, step, {0});
        if (staleness == 0) {
          worker.client.commit(step, {1});
          cut_all_connections();
          worker.client.sum(step, {0});
        }
        cut_all_connections();
        worker.client.apply(command);
        cut_all_connections();
        expected.step(command);
        check_same(worker, expected, staleness == 0 ? step : 0);
      }
    }
  }
}

TEST_CASE("tables go on from a server's snapshot", "[server]") {
  for (const uint32_t staleness : {0U, kAnyStaleness}) {
    Plan plan = table_plan(2, 1, two_adam_groups(), RowPlacement::range);
    plan.staleness = staleness;
    plan.heartbeat_ms = 2'000;
    const testing::Folder folder;
    const auto names = testing::server_names(2);
    const auto config_at = [&](size_t s) {
      return ServerConfig{names[s], folder.path / std::to_string(s), std::chrono::milliseconds(1'000'000)};
    };
    std::vector<std::unique_ptr<ParameterServer>> servers;
    for (size_t s = 0; s < 2; ++s) servers.push_back(std::make_unique<ParameterServer>(config_at(s)));
    TableWorker worker(names, 0, plan);
    worker.join();
    Reference expected(plan);
    const auto step = [&](uint64_t number) {
      if (staleness == 0) {
        worker.step(number);
      } else {
        worker.push(number);
        worker.client.apply(command_of(plan, number, {0}));
        worker.client.commit(number, {});
      }
      expected.step(command_of(plan, number, {0}));
    };
    step(1);
    step(2);
    servers[1]->snapshot();
    step(3);
    worker.push(4);
    servers[1].reset();
    servers[1] = std::make_unique<ParameterServer>(config_at(1));
    if (staleness == 0) {
      worker.client.commit(4, {1});
      worker.client.sum(4, {0});
    }
    worker.client.apply(command_of(plan, 4, {0}));
    if (staleness != 0) worker.client.commit(4, {});
    expected.step(command_of(plan, 4, {0}));
    CHECK_NOTHROW(check_same(worker, expected, staleness == 0 ? 4 : 0));

    // All of it, with the sums of the last step, which a slow member may still ask for.
    const auto sums = staleness == 0 ? worker.client.sum(4, {0}) : kernels::NormSum();
    for (size_t s = 0; s < 2; ++s) {
      servers[s]->snapshot();
      servers[s].reset();
      servers[s] = std::make_unique<ParameterServer>(config_at(s));
    }
    if (staleness == 0) CHECK(worker.client.sum(4, {0}) == sums);
    step(5);
    CHECK_NOTHROW(check_same(worker, expected, staleness == 0 ? 5 : 0));
  }
}

TEST_CASE("with staleness rows are stepped by whoever pushes them, each push once", "[server]") {
  constexpr int kWorkers = 3;
  constexpr uint64_t kSteps = 20;
  Plan plan = table_plan(2, kWorkers, std::vector<kernels::SgdGroup>{{1, 0, 0, 0, false, false}}, RowPlacement::modulo);
  plan.tables = {{"counts", 10, 3, RowPlacement::modulo, {RowInitialiser::Kind::normal, 0, 0}, 0}};
  plan.staleness = 2;
  const Servers running(testing::server_names(2));
  const std::string failures = testing::run_threads(kWorkers, [&](int rank) {
    TableWorker worker(running.names, static_cast<uint32_t>(rank), plan, rank != 1);
    worker.join();
    for (uint64_t step = 1; step <= kSteps; ++step) {
      worker.client.rows().push(step, 0, Rows{rank, 9}, Floats(6, 1));
      worker.client.flush();
      Apply command;
      command.step = step;
      command.members = {static_cast<uint32_t>(rank)};
      command.groups = plan.groups;
      worker.client.apply(command);
      worker.client.commit(step, {});
      Floats own(3);
      worker.client.rows().pull(0, 0, Rows{rank}, own);
      MUSTER_CHECK(own == Floats(3, -static_cast<float>(step)));
    }
    worker.client.leave();
  });
  CHECK(failures == "");
  TableWorker last(running.names, 7, plan);
  last.join();
  const auto rows = last.client.rows().fetch(0, kWorkers * kSteps);
  CHECK(rows.rows == Rows{0, 1, 2, 9});
  CHECK(rows.values[0] == -20);
  CHECK(rows.values[9] == -60);
  CHECK(rows.steps == kWorkers * kSteps);
}

TEST_CASE("a request about rows that makes no sense changes nothing", "[server]") {
  const Plan plan = table_plan(2, 1, two_sgd_groups(), RowPlacement::modulo);
  const Servers running(testing::server_names(2));
  TableWorker worker(running.names, 0, plan);
  worker.join();
  auto& client = worker.client;
  Floats five(5);
  CHECK_THROWS_AS(client.rows().pull(3, 0, Rows{1}, five), InvalidArgument);
  CHECK_THROWS_AS(client.rows().pull(0, 0, Rows{10'000'000}, five), InvalidArgument);
  CHECK_THROWS_AS(client.rows().pull(0, 0, Rows{-1}, five), InvalidArgument);
  CHECK_THROWS_AS(client.rows().pull(0, 0, Rows{1, 2}, five), InvalidArgument);
  CHECK_THROWS_AS(client.rows().push(1, 0, Rows{1, 1}, Floats(10)), InvalidArgument);
  CHECK_THROWS_AS(client.rows().push(1, 0, Rows{1}, Floats(4)), InvalidArgument);
  CHECK_THROWS_AS(client.rows().push(1, 0, Rows{10'000'000}, five), InvalidArgument);
  CHECK_THROWS_AS(client.rows().write(0, Rows{1}, five, five), InvalidArgument);
  CHECK_THROWS_AS(client.rows().write_steps(3, 1), InvalidArgument);
  CHECK_THROWS_AS(client.rows().fetch(3, 0), InvalidArgument);

  const auto in = [](int ms) { return std::chrono::steady_clock::now() + std::chrono::milliseconds(ms); };
  const auto channel = net::connect_on_host(running.names[0], nullptr, in(5'000));
  const auto answer_to = [&](const auto& message, const Rows& rows = {}, const Floats& values = {}) {
    const Bytes payload[] = {std::as_bytes(std::span(rows)), std::as_bytes(std::span(values))};
    channel->send(std::decay_t<decltype(message)>::kType, encode(message), payload, in(5'000));
    net::Frame frame;
    MUSTER_CHECK(channel->receive(frame, in(5'000)));
    return frame;
  };
  const auto is_refused = [&](const auto& message, const Rows& rows = {}, const Floats& values = {}) {
    const auto frame = answer_to(message, rows, values);
    return frame.type == Refusal::kType && decode<Refusal>(frame.message).kind == Refusal::Kind::invalid_argument;
  };
  CHECK(is_refused(PushRows{1, 0, 0, 1}, {2}, five));  // before Hello
  CHECK(answer_to(Hello{6, 0, 0}).type == Welcome::kType);
  CHECK(is_refused(PushRows{1, 9, 0, 1}, {2}, five));
  CHECK(is_refused(PushRows{1, 0, 0, 1}, {2}, Floats(4)));
  CHECK(is_refused(PushRows{1, 0, 0, 1}, {3}, five));  // the other server's
  CHECK(is_refused(PushRows{1, 0, 0, 1}, {10'000'000}, five));
  CHECK(is_refused(PushRows{1, 0, 0, 1}, {-2}, five));
  CHECK(is_refused(PushRows{1, 0, 0, 1}, {4, 2}, Floats(10)));
  CHECK(is_refused(PushRows{1, 0, 1, 2}, {2}, five));
  CHECK(is_refused(PushRows{1, 0, 0, 0}, {2}, five));
  CHECK(is_refused(PullRows{0, 0, false, 0}, {3}));
  CHECK(is_refused(PullRows{0, 0, true, 64}, {2}));
  CHECK(is_refused(PullRows{9, 0, false, 0}, {2}));
  CHECK(is_refused(PullRows{1, 0, false, 0}, Rows(2000, 2)));  // 32 MB
  CHECK(is_refused(WriteRows{0}, {3}, five));
  CHECK(is_refused(WriteRows{9}));
  CHECK(is_refused(WriteRowSteps{9, 1}));
  CHECK(is_refused(FetchRows{9, 0, 0, 0}));
  CHECK(is_refused(FetchRows{0, 99, 0, 0}));
  CHECK(is_refused(Sum{1, {1, 0}}));

  const auto stripe_of = [&](int64_t row) { return stripes_of(plan.tables[0], plan).of(row); };
  REQUIRE((stripe_of(2) < stripe_of(4) && stripe_of(4) == stripe_of(12)));
  CHECK(is_refused(PushRows{1, 0, 0, 1}, {4, 2}, Floats(10)));        // stripes do not ascend
  CHECK(is_refused(PushRows{1, 0, 0, 1}, {2, 12, 4}, Floats(15)));    // rows of a stripe do not
  CHECK(is_refused(PushRows{1, 0, 0, 1}, {2, 4, 2, 6}, Floats(20)));  // a stripe comes twice
  CHECK(running.running[0]->stats().held_bytes == 0);                 // in no stripe
  const auto is_fresh = [&](const PushRows& push, const Rows& rows) {
    return decode<Pushed>(answer_to(push, rows, Floats(rows.size() * 5)).message).fresh;
  };
  CHECK(is_fresh({1, 0, 0, 2}, {2, 4}));
  CHECK_FALSE(is_fresh({1, 0, 0, 2}, {2, 4}));
  CHECK(is_refused(PushRows{1, 0, 1, 2}, {4}, five));
  CHECK(is_refused(PushRows{1, 0, 1, 3}, {6}, five));
  CHECK(is_fresh({1, 0, 1, 2}, {6}));
  for (uint64_t step = 2; step <= Pushes::kMaxHeld; ++step) CHECK(is_fresh({step, 0, 0, 1}, {2}));
  CHECK(is_refused(PushRows{Pushes::kMaxHeld + 1, 0, 0, 1}, {2}, five));

  Reference expected(plan);
  worker.step(1);
  expected.step(command_of(plan, 1, {0}));
  check_same(worker, expected, 1);
  const auto held = running.running[0]->stats().held_bytes;
  CHECK_FALSE(is_fresh({1, 0, 0, 1}, {2}));
  CHECK(running.running[0]->stats().held_bytes == held);

  client.rows().push(2, 0, Rows{1}, five);
  CHECK_THROWS_AS(client.rows().push(2, 0, Rows{2}, five), InvalidArgument);
  const auto message = testing::message_of<InvalidArgument>([&] { client.sum(2, {0}); });
  CHECK(testing::contains(message, "'items'"));
  CHECK_THROWS_AS(client.apply(command_of(plan, 2, {0})), InvalidArgument);
}

TEST_CASE("a table's optimizer keeps its kind, and leaves alone what was not touched", "[server]") {
  Plan plan = table_plan(1, 1, two_sgd_groups(), RowPlacement::modulo);
  const Servers running(testing::server_names(1));
  auto moving = plan;
  std::get<1>(moving.groups)[0].momentum = .9;
  const auto message =
      testing::message_of<InvalidArgument>([&] { const ServerClient client(config_of(running.names, 0, moving)); });
  CHECK(testing::contains(message, "move every row of a sparse embedding"));

  const auto in = [](int ms) { return std::chrono::steady_clock::now() + std::chrono::milliseconds(ms); };
  const auto channel = net::connect_on_host(running.names[0], nullptr, in(5'000));
  net::Frame frame;
  channel->send(Hello::kType, encode(Hello{0, 0, 0}), {}, in(5'000));
  MUSTER_CHECK(channel->receive(frame, in(5'000)));
  channel->send(Configure::kType, encode(Configure{0, moving}), {}, in(5'000));
  MUSTER_CHECK(channel->receive(frame, in(5'000)));
  REQUIRE(frame.type == Refusal::kType);
  CHECK(testing::contains(decode<Refusal>(frame.message).text, "move every row of a sparse embedding"));

  TableWorker worker(running.names, 0, plan);
  worker.join();
  worker.push(1);
  worker.client.commit(1, {1});
  auto command = command_of(plan, 1, {0});
  command.groups = two_adagrad_groups();
  CHECK_THROWS_AS(worker.client.apply(command), InvalidArgument);
  command.groups = moving.groups;
  CHECK_THROWS_AS(worker.client.apply(command), InvalidArgument);
  command.groups = std::vector<kernels::SgdGroup>(1);
  CHECK_THROWS_AS(worker.client.apply(command), InvalidArgument);
  worker.client.apply(command_of(plan, 1, {0}));
  Reference expected(plan);
  expected.step(command_of(plan, 1, {0}));
  check_same(worker, expected, 1);
}
