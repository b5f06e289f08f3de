// Preparing, dividing and collecting, on the replicas of one process.
#include "muster/strategy.h"

#include <ATen/Context.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <atomic>
#include <cmath>

#include "cpp/catch.h"
#include "cpp/strategy/workers.h"
#include "muster/mirrored.h"

using namespace muster;
using testing::cpus;

namespace {

using Example = torch::data::Example<>;

struct Plain : torch::nn::Module {
  explicit Plain(int64_t inputs = 2) : linear(register_module("linear", torch::nn::Linear(inputs, 1))) {}
  at::Tensor forward(const at::Tensor& x) { return linear(x); }
  torch::nn::Linear linear;
};

// The module each local replica sees.
template <class M>
std::vector<M*> seen_by_replicas(MirroredStrategy& strategy, const Replicated<M>& model) {
  const auto n = static_cast<size_t>(strategy.num_local_replicas());
  return strategy
      .run([&](const at::Tensor&) { return &*model; }, PerReplica(std::vector<at::Tensor>(n, at::zeros({1}))))
      .parts();
}

}  // namespace

TEST_CASE("every replica has its own module over the same parameters", "[strategy]") {
  MirroredStrategy strategy(cpus(3));
  int built = 0;
  auto model = strategy.prepare([&] {
    ++built;
    return Plain(4);
  });
  CHECK(built == 3);
  CHECK(&*model == &model.module());
  const auto modules = seen_by_replicas(strategy, model);
  CHECK(modules[0] == &model.module());
  CHECK(modules[1] != modules[0]);
  CHECK(modules[2] != modules[1]);
  for (auto* module : modules) {
    CHECK(module->linear->weight.const_data_ptr() == model->linear->weight.const_data_ptr());
    CHECK((module == modules[0]) == module->linear->weight.is_same(model->linear->weight));
  }
}

TEST_CASE("factories may return shared pointers and holders", "[strategy]") {
  MirroredStrategy strategy(cpus(2));
  auto shared = strategy.prepare([] { return std::make_shared<Plain>(); });
  auto holder = strategy.prepare([] { return torch::nn::Linear(2, 3); });
  CHECK(shared->linear->weight.sizes() == at::IntArrayRef({1, 2}));
  CHECK(holder->weight.sizes() == at::IntArrayRef({3, 2}));
  CHECK_THROWS_AS(strategy.prepare([] { return std::shared_ptr<Plain>(); }), InvalidArgument);
}

TEST_CASE("a module that exists is cloned, and preparing it again changes nothing", "[strategy]") {
  MirroredStrategy strategy(cpus(2));
  torch::nn::Sequential net(torch::nn::Linear(2, 3), torch::nn::Linear(3, 1));
  auto model = strategy.prepare(net);
  CHECK(model.ptr() == net.ptr());
  auto again = strategy.prepare(net);
  CHECK(seen_by_replicas(strategy, model) == seen_by_replicas(strategy, again));
  CHECK_THROWS_WITH(strategy.prepare(std::make_shared<Plain>()), ContainsSubstring("factory"));
  CHECK_THROWS_AS(strategy.prepare(std::shared_ptr<Plain>()), InvalidArgument);

  MirroredStrategy single;
  single.prepare(std::make_shared<Plain>());
}

TEST_CASE("programs draw alike whatever the number of local replicas", "[strategy]") {
  const auto draw = [](int replicas) {
    at::manual_seed(3);
    MirroredStrategy strategy(cpus(replicas));
    auto first = strategy.prepare([] { return Plain(); });
    auto second = strategy.prepare([] { return Plain(); });
    auto third = strategy.prepare(torch::nn::Linear(2, 1));
    return std::vector{first->linear->weight.detach().clone(), second->linear->weight.detach().clone(),
                       third->weight.detach().clone()};
  };
  const auto one = draw(1);
  const auto three = draw(3);
  for (size_t i = 0; i < one.size(); ++i) CHECK(one[i].equal(three[i]));
}

TEST_CASE("a timeout that no clock can count is refused", "[strategy]") {
  for (const double timeout : {0.0, 1e-4, 1e10, 1e300, std::nan("")}) {
    CHECK_THROWS_WITH(MirroredStrategy({}, StrategyOptions{.timeout = timeout}),
                      ContainsSubstring("from 0.001 to 1e9"));
  }
  CHECK_NOTHROW(MirroredStrategy({}, StrategyOptions{.timeout = 1e9}));
}

TEST_CASE("a module belongs to one open strategy", "[strategy]") {
  auto module = std::make_shared<Plain>();
  MirroredStrategy first;
  first.prepare(module);
  {
    MirroredStrategy second;
    CHECK_THROWS_WITH(second.prepare(module), ContainsSubstring("another open strategy"));
    first.close();
    second.prepare(module);
  }
  MirroredStrategy third;
  third.prepare(module);
}

TEST_CASE("factories that build different modules are refused", "[strategy]") {
  MirroredStrategy strategy(cpus(2));
  int64_t inputs = 1;
  CHECK_THROWS_AS(strategy.prepare([&] {
    torch::nn::Sequential net;
    for (int64_t i = 0; i < inputs; ++i) net->push_back(torch::nn::Linear(1, 1));
    ++inputs;
    return net;
  }),
                  InvalidArgument);
}

TEST_CASE("factories that give replicas one module are refused", "[strategy]") {
  MirroredStrategy strategy(cpus(2));
  const torch::nn::Linear one(2, 1);
  CHECK_THROWS_WITH(strategy.prepare([&] { return one; }), ContainsSubstring("'weight' is one tensor"));
  CHECK_THROWS_WITH(strategy.prepare([&] { return torch::nn::Sequential(torch::nn::Linear(2, 2), one); }),
                    ContainsSubstring("'1.weight' is one tensor"));
}

TEST_CASE("tensors shared in replica 0 must be shared in its clones", "[strategy]") {
  struct Tied : torch::nn::Cloneable<Tied> {
    Tied() { reset(); }
    void reset() override {
      first = register_parameter("first", at::ones({2}));
      second = register_parameter("second", at::ones({2}));
    }
    at::Tensor first;
    at::Tensor second;
  };
  auto tied = std::make_shared<Tied>();
  tied->register_parameter("alias", tied->first);
  MirroredStrategy strategy(cpus(2));
  CHECK_THROWS_AS(strategy.prepare(tied), InvalidArgument);
  auto model = strategy.prepare([] {
    auto module = std::make_shared<Tied>();
    module->register_parameter("alias", module->first);
    return module;
  });
  CHECK(strategy
            .step([&](const at::Tensor& x) { return (model->first * x).sum(); },
                  PerReplica<at::Tensor>({at::ones({2}), at::ones({2})}))
            .stepped);
  CHECK(model->first.grad().defined());
}

TEST_CASE("a batch from elsewhere is divided over the local replicas", "[strategy]") {
  MirroredStrategy strategy(cpus(4));
  const Example batch(at::arange(18, at::kFloat).view({9, 2}), at::arange(9));
  const auto seen = strategy.run([](const Example& part) { return part; }, batch);
  const std::vector<int64_t> sizes{3, 2, 2, 2};
  int64_t start = 0;
  for (size_t r = 0; r < 4; ++r) {
    CHECK(seen[r].data.equal(batch.data.narrow(0, start, sizes[r])));
    CHECK(seen[r].target.equal(batch.target.narrow(0, start, sizes[r])));
    CHECK(reinterpret_cast<uintptr_t>(seen[r].data.const_data_ptr()) % 64 == 0);
    start += sizes[r];
  }
  CHECK(seen.rows() == sizes);

  const auto few = strategy.run([](const at::Tensor& part) { return part.sum(); }, at::ones({2}));
  CHECK(few[1].item<double>() == 1);
  CHECK_FALSE(few[2].defined());
}

TEST_CASE("batches that cannot be divided are refused with the leaf's name", "[strategy]") {
  MirroredStrategy strategy(cpus(2));
  const auto nothing = [](const auto&) {};
  CHECK_THROWS_WITH(strategy.run(nothing, Example(at::ones({4, 2}), at::ones({3}))), ContainsSubstring(".target"));
  CHECK_THROWS_WITH(strategy.run(nothing, at::scalar_tensor(1.0, at::kDouble)), ContainsSubstring("rows"));
  CHECK_THROWS_WITH(strategy.run(nothing, 3), ContainsSubstring("PerReplica"));
  CHECK_THROWS_WITH(strategy.run(nothing, PerReplica<at::Tensor>({at::ones({1})})),
                    ContainsSubstring("2 local replicas"));
  CHECK_THROWS_AS(PerReplica<at::Tensor>({at::ones({1})}, {1, 2}), InvalidArgument);
  MirroredStrategy single;
  CHECK(single.run([](int number) { return number + 1; }, 3)[0] == 4);
}

TEST_CASE("a mean loss of unknown size needs a weight", "[strategy]") {
  MirroredStrategy strategy(cpus(2));
  auto model = strategy.prepare([] { return Plain(); });
  const PerReplica<Example> batch({Example(at::ones({4, 2}), at::ones({3})), Example(at::ones({4, 2}), at::ones({3}))});
  const auto mean = [&](const Example& part) { return model->forward(part.data).mean(); };
  CHECK_THROWS_WITH(strategy.step(mean, batch), ContainsSubstring("weight"));
  CHECK(strategy
            .step(
                [&](const Example& part) {
                  Loss loss(mean(part));
                  loss.weight = at::scalar_tensor(4.0, at::kDouble);
                  return loss;
                },
                batch)
            .stepped);
}

TEST_CASE("results of run are collected over replicas", "[strategy]") {
  MirroredStrategy strategy(cpus(3));
  const PerReplica<at::Tensor> batch(
      {at::arange(3, at::kDouble), at::zeros({0}, at::kDouble), at::arange(3, 4, at::kDouble)});
  std::atomic<int> calls{0};
  const auto means = strategy.run(
      [&](const at::Tensor& x) {
        ++calls;
        if (x.requires_grad() || at::GradMode::is_enabled()) throw std::logic_error("run() has gradients");
        return x.mean();
      },
      batch);
  CHECK(calls == 2);
  CHECK(strategy.reduce(means).item<double>() == Approx(1.5));
  CHECK(strategy.reduce(means, ReduceOp::sum).item<double>() == Approx(4));
  CHECK(strategy.reduce(means, ReduceOp::max).item<double>() == 3);
  CHECK(strategy.gather(means).equal(at::tensor({1.0, 3.0}, at::kDouble)));
  const auto both = strategy.run([](const at::Tensor& x) { return std::vector{x.sum(), x}; }, batch);
  CHECK(strategy.gather(both)[1].equal(at::arange(4, at::kDouble)));
  CHECK_THROWS_AS(strategy.reduce(PerReplica<at::Tensor>(std::vector<at::Tensor>(3))), InvalidArgument);
  const PerReplica<at::Tensor> given({at::ones({}), at::ones({}), at::ones({})}, {2, 0, 1});
  CHECK(strategy.reduce(given, ReduceOp::sum).item<double>() == 2);
  CHECK(strategy.reduce(at::scalar_tensor(2.0, at::kDouble)).item<double>() == 2);
  CHECK(strategy.broadcast(at::scalar_tensor(2.0, at::kDouble)).item<double>() == 2);
}

TEST_CASE("a strategy says where it is and what it does", "[strategy]") {
  MirroredStrategy strategy({"cpu:0", "cpu:1"}, {.accumulate = 2, .threads_per_replica = 1});
  CHECK(strategy.num_replicas() == 2);
  CHECK(strategy.num_workers() == 1);
  CHECK(strategy.is_chief());
  CHECK(strategy.device() == c10::Device(c10::kCPU));
  CHECK(strategy.replica() == 0);
  const auto replicas = strategy.run([&](const at::Tensor&) { return strategy.replica(); }, at::zeros({2}));
  CHECK(replicas.parts() == std::vector{0, 1});
  CHECK_THAT(strategy.explain(), ContainsSubstring("2 replicas") && ContainsSubstring("2 micro-batch(es)"));
  strategy.barrier();
  strategy.close();
  strategy.close();
  CHECK_THROWS_AS(strategy.barrier(), InvalidArgument);
  CHECK_THROWS_AS(strategy.run([](const at::Tensor& x) { return x; }, at::zeros({2})), InvalidArgument);
  CHECK_THROWS_AS(MirroredStrategy({"gpu?"}), InvalidArgument);
  CHECK_THROWS_AS(MirroredStrategy({}, {.accumulate = 0}), InvalidArgument);
}
