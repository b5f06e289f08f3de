// Parameter servers in C++: the bits of workers that reduce among themselves, and a job of one.
#include "muster/parameter_server.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/sin.h>
#include <torch/nn/modules/linear.h>
#include <torch/serialize.h>

#include <functional>
#include <memory>
#include <sstream>

#include "cpp/catch.h"
#include "cpp/strategy/workers.h"
#include "muster/error.h"
#include "muster/mirrored.h"
#include "muster/optim.h"
#include "muster/sharded_embedding.h"
#include "strategy/build.h"
#include "strategy/strategy_core.h"
#include "support/run_ranks.h"
#include "support/servers.h"
#include "support/topology.h"

using namespace muster;
using namespace muster::testing;

namespace {

constexpr comm::Milliseconds kTimeout = Seconds(60);

struct Net : torch::nn::Module {
  Net()
      : first(register_module("first", torch::nn::Linear(6, 40))),
        last(register_module("last", torch::nn::Linear(40, 2))) {
    const torch::NoGradGuard no_grad;
    double phase = 0;
    for (auto& p : parameters()) p.copy_(at::sin(at::arange(p.numel()) * 0.37 + (phase += 0.5)).view(p.sizes()) * 0.3);
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(torch::relu(first(x))); }
  torch::nn::Linear first;
  torch::nn::Linear last;
};

at::Tensor batch_of(int replica, int step) {
  return at::sin(at::arange((3 + replica) * 6) * 1.1 + replica + step * 0.2).view({3 + replica, 6});
}

// What make(replica) gives each of this worker's replicas.
PerReplica<at::Tensor> for_each_replica(Strategy& strategy, const std::function<at::Tensor(int)>& make) {
  std::vector<at::Tensor> parts;
  for (int r = 0; r < strategy.num_local_replicas(); ++r) parts.push_back(make(strategy.replica() + r));
  return PerReplica<at::Tensor>(std::move(parts));
}

using Values = std::vector<at::Tensor>;

Values train(Strategy& strategy, int steps) {
  auto net = strategy.prepare([] { return Net(); });
  optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.02));
  strategy.prepare(optimizer);
  for (int step = 0; step < steps; ++step) {
    const auto batch = for_each_replica(strategy, [&](int replica) { return batch_of(replica, step); });
    const auto result = strategy.step([&](const at::Tensor& x) { return net->forward(x).square().mean(); }, batch);
    MUSTER_CHECK(result.stepped);
    static_cast<torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options()).lr(0.02 / (step + 1));
  }
  Values values;
  for (const auto& p : net->parameters()) values.push_back(p.detach().clone());
  return values;
}

struct Clicks : torch::nn::Module {
  explicit Clicks(bool is_row_wise = false)
      : table(register_module("table", ShardedEmbedding(60, 8,
                                                        ShardedEmbeddingOptions{.mode = Reduction::sum,
                                                                                .scale = 0.3,
                                                                                .seed = 4,
                                                                                .placement = RowPlacement::range,
                                                                                .row_wise_adagrad = is_row_wise}))),
        read(register_module("read", torch::nn::Linear(8, 1))) {
    const torch::NoGradGuard no_grad;
    read->weight.copy_(at::sin(at::arange(8) * 0.9).view({1, 8}));
    read->bias.fill_(0.1);
  }
  torch::Tensor forward(const torch::Tensor& ids) { return read(table(ids)); }
  ShardedEmbedding table;
  torch::nn::Linear read;
};

Values train_rows(Strategy& strategy, bool is_row_wise) {
  auto net = strategy.prepare([&] { return Clicks(is_row_wise); });
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (is_row_wise) {
    optimizer = std::make_unique<optim::Adagrad>(net->parameters(), torch::optim::AdagradOptions(0.05).lr_decay(0.1));
  } else {
    optimizer = std::make_unique<optim::Adam>(net->parameters(), torch::optim::AdamOptions(0.05));
  }
  strategy.prepare(*optimizer);
  const auto loss = [&](const at::Tensor& ids) { return net->forward(ids).square().mean(); };
  for (int step = 0; step < 8; ++step) {
    strategy.step(loss, for_each_replica(strategy, [&](int replica) {
                    return (at::arange(12) * (3 + step) + 5 * replica).remainder(60).view({4, 3});
                  }));
  }
  std::stringstream stream;
  torch::save(net->table, stream);
  ShardedEmbedding whole(60, 8, ShardedEmbeddingOptions{.mode = Reduction::sum});
  torch::load(whole, stream);
  return {whole->weight, net->read->weight.detach().clone(), net->read->bias.detach().clone()};
}

// Each worker is a thread, of so many replicas; `servers`: none reduces among the workers.
std::vector<Values> train_workers(int n, const std::vector<std::string>& servers,
                                  const std::function<Values(Strategy&)>& train, int replicas = 1) {
  const auto gradients = comm::make_local(n * replicas, kTimeout);
  const auto step = comm::make_local(n * replicas, kTimeout);
  const auto workers = comm::make_local(n, kTimeout);
  std::vector<Values> values(static_cast<size_t>(n));
  const auto failures = run_threads(n, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    const auto topology = replicas_each(rank, n, replicas);
    const auto own = [&](const std::vector<comm::CommunicatorPtr>& all) {
      const auto first = all.begin() + topology.first_replica;
      return std::vector(first, first + replicas);
    };
    Groups groups;
    groups.gradients = servers.empty() ? own(gradients) : comm::make_local(replicas, kTimeout);
    groups.step = own(step);
    groups.workers = workers[r];
    if (!servers.empty()) groups.servers = ServerJob{.channels = servers, .staleness = 0, .embedded = nullptr};
    StrategyOptions options;
    options.clip_norm = 0.4;
    auto pool = std::make_shared<ReplicaPool>(replicas, 1);
    pool->start();
    OneWorker worker(std::make_shared<StrategyCore>(topology, groups, options, std::move(pool), 7));
    values[r] = train(worker);
  });
  CHECK(failures.empty());
  return values;
}

}  // namespace

TEST_CASE("C++ workers of parameter servers get the bits of workers that reduce among themselves",
          "[strategy][server]") {
  const auto body = [](Strategy& strategy) { return train(strategy, 12); };
  const auto expected = train_workers(3, {}, body);
  const Servers servers(server_names(2));
  const auto actual = train_workers(3, servers.names, body);
  for (const auto& values : actual) CHECK(bit_equal(values, expected.front()));
}

TEST_CASE("C++ workers of several replicas get the bits of as many workers and of one process", "[strategy][server]") {
  StrategyOptions options;
  options.clip_norm = 0.4;
  const bool has_rows = GENERATE(false, true);
  const auto body = [&](Strategy& strategy) { return has_rows ? train_rows(strategy, false) : train(strategy, 12); };
  MirroredStrategy mirrored({"cpu", "cpu", "cpu", "cpu"}, options);
  const auto expected = body(mirrored);
  for (const int workers : {1, 2, 4}) {
    CAPTURE(workers, has_rows);
    const Servers servers(server_names(2));
    for (const auto& values : train_workers(workers, servers.names, body, 4 / workers)) {
      CHECK(bit_equal(values, expected));
    }
  }
}

TEST_CASE("a C++ worker of several replicas steps on its own as one process does", "[strategy][server]") {
  const std::vector<std::string> devices{"cpu", "cpu"};
  StrategyOptions options;
  options.threads_per_replica = 1;
  options.clip_norm = 0.4;
  MirroredStrategy mirrored(devices, options);
  const auto expected = train(mirrored, 5);
  const std::optional<int> staleness = GENERATE(std::optional<int>(3), std::optional<int>());
  ParameterServerStrategy strategy(Cluster{}, devices, {.staleness = staleness}, options);
  CHECK(bit_equal(train(strategy, 5), expected));
  CHECK_THROWS_WITH(ParameterServerStrategy(Cluster{}, {"cuda:0"}, {}, {}), ContainsSubstring("on the CPU"));
}

TEST_CASE("rows of C++ embeddings on servers get the bits of rows in one process", "[strategy][server]") {
  StrategyOptions options;
  options.clip_norm = 0.4;
  MirroredStrategy mirrored({"cpu", "cpu"}, options);
  const bool is_row_wise = GENERATE(false, true);
  const auto body = [&](Strategy& strategy) { return train_rows(strategy, is_row_wise); };
  const auto expected = body(mirrored);
  const Servers servers(server_names(2));
  const auto actual = train_workers(2, servers.names, body);
  for (const auto& values : actual) CHECK(bit_equal(values, expected));
}

TEST_CASE("a C++ embedding's rows come back when its strategy closes", "[strategy][server]") {
  std::shared_ptr<Clicks> net;
  at::Tensor saved;
  {
    ParameterServerStrategy strategy(Cluster{});
    net = strategy.prepare([] { return Clicks(); }).ptr();
    const auto first = net->table->weight.clone();
    optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.5));
    strategy.prepare(optimizer);
    const auto ids = at::arange(12).view({4, 3});
    strategy.step([&](const at::Tensor& x) { return net->forward(x).square().mean(); }, ids);
    CHECK(net->table->weight.isnan().all().item<bool>());
    CHECK(net->table->weight.storage().nbytes() == sizeof(float));
    std::stringstream stream;
    torch::save(net->table, stream);
    ShardedEmbedding loaded(60, 8, ShardedEmbeddingOptions{.mode = Reduction::sum});
    torch::load(loaded, stream);
    saved = loaded->weight;
    CHECK_FALSE(saved.narrow(0, 0, 12).equal(first.narrow(0, 0, 12)));
    CHECK(saved.narrow(0, 12, 48).equal(first.narrow(0, 12, 48)));
  }
  CHECK(net->table->weight.equal(saved));
}

TEST_CASE("a C++ job of one hosts its server", "[strategy][server]") {
  StrategyOptions options;
  options.threads_per_replica = 1;
  const auto train_with = [&](Strategy&& strategy) { return train(strategy, 5); };
  const auto expected = train_with(MirroredStrategy({"cpu"}, options));
  CHECK(bit_equal(train_with(ParameterServerStrategy(Cluster{}, {}, options)), expected));
  // Alone, nobody is waited for.
  CHECK(bit_equal(train_with(ParameterServerStrategy(Cluster{}, {.staleness = 3}, options)), expected));
  CHECK(bit_equal(train_with(ParameterServerStrategy(Cluster{}, {.staleness = std::nullopt}, options)), expected));
}

TEST_CASE("C++ strategies refuse what parameter servers cannot do", "[strategy][server]") {
  StrategyOptions options;
  options.shard_optimizer = true;
  CHECK_THROWS_AS(ParameterServerStrategy(Cluster{}, {}, options), InvalidArgument);
  CHECK_THROWS_AS(ParameterServerStrategy(Cluster{}, {.staleness = -2}), InvalidArgument);
  ParameterServerStrategy strategy(Cluster{});
  auto net = strategy.prepare([] { return Net(); });
  torch::optim::AdamW plain(net->parameters());
  strategy.prepare(plain);
  CHECK_THROWS_AS(strategy.step([&](const at::Tensor& x) { return net->forward(x).sum(); }, batch_of(0, 0)),
                  InvalidArgument);
}

TEST_CASE("a module that is loaded while servers hold its parameters is refused for that", "[strategy][server]") {
  auto net = std::make_shared<Net>();
  std::stringstream saved;
  torch::save(net, saved);
  ParameterServerStrategy strategy(Cluster{});
  auto model = strategy.prepare(net);
  optim::AdamW optimizer(net->parameters(), 0.02);
  strategy.prepare(optimizer);
  const auto step = [&] {
    strategy.step([&](const at::Tensor& x) { return model->forward(x).sum(); }, batch_of(0, 0));
  };
  step();
  torch::load(net, saved);
  CHECK_THROWS_WITH(step(), ContainsSubstring("was written outside step()"));
}

TEST_CASE("on servers a C++ optimizer's state is refused, saved, and comes back", "[strategy][server]") {
  using State = torch::optim::AdamWParamState;
  const auto train_three = [](Strategy& strategy, std::shared_ptr<Net>& net, optim::AdamW& optimizer) {
    auto model = strategy.prepare(net);
    strategy.prepare(optimizer);
    const auto step = [&] {
      strategy.step([&](const at::Tensor& x) { return model->forward(x).square().mean(); }, batch_of(0, 1));
    };
    for (int i = 0; i < 3; ++i) step();
    return std::function<void()>(step);
  };
  auto expected_net = std::make_shared<Net>();
  optim::AdamW expected(expected_net->parameters(), 0.02);
  auto net = std::make_shared<Net>();
  optim::AdamW optimizer(net->parameters(), 0.02);
  const auto state_of = [](optim::AdamW& of, Net& module) -> State& {
    return static_cast<State&>(*of.state().at(module.parameters().front().unsafeGetTensorImpl()));
  };
  MirroredStrategy mirrored({"cpu"});
  train_three(mirrored, expected_net, expected);
  std::stringstream saved;
  {
    ParameterServerStrategy strategy(Cluster{});
    auto model = net;
    const auto loss = [&](const at::Tensor& x) { return model->forward(x).square().mean(); };
    train_three(strategy, net, optimizer);
    torch::save(optimizer, saved);
    CHECK_THROWS_AS(torch::load(optimizer, saved), InvalidArgument);
    auto kept = std::move(optimizer.state().begin()->second);
    auto* const key = optimizer.state().begin()->first;
    optimizer.state().erase(key);
    CHECK_THROWS_AS(strategy.step(loss, batch_of(0, 1)), InvalidArgument);
    optimizer.state()[key] = std::move(kept);
    optim::SGD another(net->parameters(), torch::optim::SGDOptions(0.1));
    strategy.prepare(another);
    StepOptions options;
    options.optimizers = {another};
    CHECK_THROWS_WITH(strategy.step(loss, batch_of(0, 1), options), ContainsSubstring("step one optimizer"));
    {
      const at::NoGradGuard no_grad;
      net->parameters().front().variable_data().clamp_(-0.01, 0.01);
    }
    options.optimizers = {optimizer};
    CHECK_THROWS_WITH(strategy.step(loss, batch_of(0, 1), options), ContainsSubstring("was written outside step"));
    strategy.close();
  }
  CHECK(state_of(optimizer, *net).step() == 3);
  CHECK(state_of(optimizer, *net).exp_avg().equal(state_of(expected, *expected_net).exp_avg()));
  saved.seekg(0);
  optim::AdamW loaded(net->parameters(), 0.02);
  torch::load(loaded, saved);
  CHECK(state_of(loaded, *net).exp_avg_sq().equal(state_of(expected, *expected_net).exp_avg_sq()));
  CHECK(state_of(loaded, *net).step() == 3);
}

TEST_CASE("on servers C++ Adagrad starts rows at 0 alone", "[strategy][server]") {
  ShardedEmbedding table(8, 2, ShardedEmbeddingOptions{.on_servers = true});
  for (const double initial : {0.5, 0.0}) {
    optim::Adagrad optimizer(table->parameters(), torch::optim::AdagradOptions(0.1).initial_accumulator_value(initial));
    ParameterServerStrategy strategy(Cluster{});
    auto model = strategy.prepare(table.ptr());
    strategy.prepare(optimizer);
    const auto step = [&] {
      strategy.step([&](const at::Tensor& ids) { return model->forward(ids).square().mean(); }, at::arange(8));
    };
    if (initial == 0) {
      CHECK_NOTHROW(step());
    } else {
      CHECK_THROWS_WITH(step(),
                        ContainsSubstring("initial_accumulator_value=0.5: rows on parameter servers start at 0"));
    }
  }
}

TEST_CASE("on servers C++ Adagrad keeps the state of what takes no step", "[strategy][server]") {
  auto net = std::make_shared<Net>();
  const auto frozen = net->parameters().back();
  frozen.set_requires_grad(false);
  optim::Adagrad optimizer(net->parameters(), torch::optim::AdagradOptions(0.1).initial_accumulator_value(0.5));
  const auto check = [&frozen](torch::optim::Optimizer& of) {
    const auto& state = static_cast<torch::optim::AdagradParamState&>(*of.state().at(frozen.unsafeGetTensorImpl()));
    CHECK(state.step() == 0);
    CHECK(state.sum().equal(at::full_like(frozen, 0.5)));
  };
  std::stringstream saved;
  {
    ParameterServerStrategy strategy(Cluster{});
    auto model = strategy.prepare(net);
    strategy.prepare(optimizer);
    strategy.step([&](const at::Tensor& x) { return model->forward(x).square().mean(); }, batch_of(0, 1));
    torch::save(optimizer, saved);
    strategy.close();
  }
  check(optimizer);
  optim::Adagrad loaded(net->parameters(), torch::optim::AdagradOptions(0.1));
  torch::load(loaded, saved);
  check(loaded);
}

TEST_CASE("an optimizer's master copies come back from servers", "[strategy][server]") {
  const auto train = [](Strategy& strategy) {
    const auto linear = std::make_shared<torch::nn::LinearImpl>(4, 2);
    {
      const at::NoGradGuard no_grad;
      for (auto& parameter : linear->parameters()) parameter.fill_(0.3);
    }
    linear->to(at::kBFloat16);
    optim::AdamW optimizer(linear->parameters(), 1e-3);
    {
      auto model = strategy.prepare(linear);
      strategy.prepare(optimizer);
      const auto loss = [&](const at::Tensor& x) { return model->forward(x).square().mean(); };
      for (int step = 0; step < 5; ++step) strategy.step(loss, at::ones({2, 4}, at::kBFloat16) * (1 + step));
      strategy.close();
    }
    std::stringstream saved;
    torch::save(optimizer, saved);
    optim::AdamW loaded(linear->parameters(), 1e-3);
    torch::load(loaded, saved);
    for (int step = 0; step < 20; ++step) {
      for (const auto& parameter : linear->parameters()) parameter.mutable_grad() = at::ones_like(parameter);
      loaded.step();
    }
    return Values{linear->weight.detach().clone(), linear->bias.detach().clone()};
  };
  MirroredStrategy one({"cpu"});
  ParameterServerStrategy servers(Cluster{});
  const auto expected = train(one);
  const auto found = train(servers);
  for (size_t i = 0; i < expected.size(); ++i) CHECK(found[i].equal(expected[i]));
}
