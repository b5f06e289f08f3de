// What ordinary C++ programs do around steps gives what plain LibTorch gives.
#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/data/datasets/base.h>
#include <torch/data/example.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/log.h"
#include "cpp/catch.h"
#include "cpp/strategy/workers.h"
#include "muster/mirrored.h"
#include "muster/optim.h"
#include "muster/strategy.h"
#include "support/child.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::testing;

namespace {

namespace nn = torch::nn;

at::Tensor batch() { return at::arange(32, at::kFloat).view({8, 4}).sin(); }

std::shared_ptr<nn::LinearImpl> linear() {
  auto module = std::make_shared<nn::LinearImpl>(4, 4);
  const at::NoGradGuard no_grad;
  for (auto& parameter : module->parameters()) {
    parameter.copy_(at::arange(parameter.numel(), at::kFloat).view(parameter.sizes()).cos());
  }
  return module;
}

}  // namespace

TEST_CASE("zero_grad() between steps of optimizers that are torch's", "[strategy]") {
  MirroredStrategy strategy(cpus(GENERATE(1, 2)));
  auto model = strategy.prepare([] { return linear(); });
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  strategy.prepare(optimizer);
  const auto plain = linear();
  torch::optim::SGD reference(plain->parameters(), 0.1);
  for (int i = 0; i < 3; ++i) {
    optimizer.zero_grad();
    strategy.step([&](const at::Tensor& x) { return model->forward(x).square().mean(); }, batch());
    reference.zero_grad();
    plain->forward(batch()).square().mean().backward();
    reference.step();
  }
  optimizer.zero_grad(/*set_to_none=*/false);
  CHECK(model.module().weight.allclose(plain->weight));
}

TEST_CASE("hooks on the parameters of replica 0 are called by all", "[strategy]") {
  MirroredStrategy strategy(cpus(2));
  auto model = strategy.prepare([] { return linear(); });
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  strategy.prepare(optimizer);
  const auto step = [&] {
    const auto before = model.module().weight.detach().clone();
    strategy.step([&](const at::Tensor& x) { return model->forward(x).square().mean(); }, batch());
    return !before.equal(model.module().weight);
  };
  CHECK(step());
  const auto hook = model.module().weight.register_hook([](const at::Tensor& gradient) { return gradient * 0; });
  CHECK_FALSE(step());
  CHECK_FALSE(step());
  model.module().weight.remove_hook(hook);
  CHECK(step());
}

TEST_CASE("a module under two names is stepped once", "[strategy]") {
  struct Tied : nn::Module {
    Tied() : a(register_module("a", linear())), b(register_module("b", a)) {}
    at::Tensor forward(const at::Tensor& x) { return b->forward(a->forward(x)); }
    std::shared_ptr<nn::LinearImpl> a, b;
  };
  const bool by_strategy = GENERATE(false, true);
  auto module = std::make_shared<Tied>();
  muster::optim::Adam optimizer(module->parameters(), torch::optim::AdamOptions(0.1));
  CHECK(module->parameters().size() == 4);
  CHECK(optimizer.param_groups().front().params().size() == 2);
  auto plain = std::make_shared<Tied>();
  torch::optim::Adam reference(plain->a->parameters(), torch::optim::AdamOptions(0.1));
  MirroredStrategy strategy(cpus(1));
  std::optional<Replicated<Tied>> model;
  if (by_strategy) {
    model.emplace(strategy.prepare([&] { return module; }));
    strategy.prepare(optimizer);
  }
  for (int i = 0; i < 4; ++i) {
    if (by_strategy) {
      strategy.step([&](const at::Tensor& x) { return (*model)->forward(x).square().mean(); }, batch());
    } else {
      optimizer.zero_grad();
      module->forward(batch()).square().mean().backward();
      optimizer.step();
    }
    reference.zero_grad();
    plain->forward(batch()).square().mean().backward();
    reference.step();
  }
  CHECK(module->a->weight.allclose(plain->a->weight, 1e-4, 1e-5));
}

TEST_CASE("a step by hand follows parameters that move to another group", "[strategy]") {
  const auto run = [](auto& optimizer, const nn::LinearImpl& module) {
    for (int i = 0; i < 2; ++i) {
      optimizer.zero_grad();
      at::linear(batch(), module.weight, module.bias).square().mean().backward();
      optimizer.step();
      auto& groups = optimizer.param_groups();
      if (i > 0) continue;
      groups[0].params().push_back(groups[1].params().front());
      groups[1].params().clear();
    }
    return module.bias.detach().clone();
  };
  const auto groups_of = [](const nn::LinearImpl& module) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<at::Tensor>{module.weight}, std::make_unique<torch::optim::SGDOptions>(0.1));
    groups.emplace_back(std::vector<at::Tensor>{module.bias}, std::make_unique<torch::optim::SGDOptions>(0.5));
    return groups;
  };
  const auto ours = linear(), theirs = linear();
  muster::optim::SGD optimizer(groups_of(*ours), torch::optim::SGDOptions(0.1));
  torch::optim::SGD reference(groups_of(*theirs), torch::optim::SGDOptions(0.1));
  CHECK(run(optimizer, *ours).allclose(run(reference, *theirs)));
}

TEST_CASE("buffers of replica 0 that are set or converted are the others'", "[strategy]") {
  MirroredStrategy strategy(cpus(2));
  auto model = strategy.prepare([] { return std::make_shared<nn::BatchNorm1dImpl>(4); });
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  strategy.prepare(optimizer);
  const auto function = [&](const at::Tensor& x) { return model->forward(x).square().mean(); };
  strategy.step(function, batch());
  const auto expected = at::full({4}, 3.0);
  model.module().running_mean.set_data(expected.clone());
  const auto means = strategy.run([&](const at::Tensor&) { return model->running_mean.clone(); }, batch());
  for (const auto& mean : means) CHECK(mean.equal(expected));
  model.module().running_mean.variable_data()[2] = 4;  // as `.data` of Python: the version stays
  const auto written = strategy.run([&](const at::Tensor&) { return model->running_mean.clone(); }, batch());
  for (const auto& mean : written) CHECK(mean.equal(at::tensor({3.0F, 3.0F, 4.0F, 3.0F})));
  model.module().to(at::kDouble);
  CHECK(strategy.step(function, batch().to(at::kDouble)).stepped);
  const auto converted = strategy.run([&](const at::Tensor&) { return model->running_mean.clone(); }, batch());
  for (const auto& mean : converted) CHECK(mean.scalar_type() == at::kDouble);
}

TEST_CASE("submodules that replica 0 alone has are refused by name", "[strategy]") {
  struct Net : torch::nn::Cloneable<Net> {
    Net() { reset(); }
    void reset() override { head = register_module("head", torch::nn::Linear(2, 1)); }
    torch::nn::Linear head{nullptr};
  };
  MirroredStrategy strategy(cpus(2));
  auto net = std::make_shared<Net>();
  auto model = strategy.prepare(net);
  const auto step = [&] {
    strategy.run([&](const at::Tensor& part) { model->head->forward(part); }, at::ones({2, 2}));
  };
  step();
  const auto first = net->head;
  net->head = net->replace_module("head", torch::nn::Linear(2, 1));
  CHECK_THROWS_WITH(step(), ContainsSubstring("submodule 'head' was registered or replaced since prepare()"));
  net->head = net->replace_module("head", first);
  step();
  net->register_module("tail", torch::nn::Linear(1, 1));
  CHECK_THROWS_WITH(step(), ContainsSubstring("submodule 'tail' was registered"));
  net->unregister_module("tail");
  step();
  net->unregister_module("head");
  CHECK_THROWS_WITH(step(), ContainsSubstring("a submodule was unregistered since prepare()"));
}

TEST_CASE("what was written before a submodule was refused is taken over afterwards", "[strategy]") {
  struct Net : nn::Cloneable<Net> {
    Net() { reset(); }
    void reset() override { norm = register_module("norm", nn::BatchNorm1d(4)); }
    nn::BatchNorm1d norm{nullptr};
  };
  MirroredStrategy strategy(cpus(2));
  const auto net = std::make_shared<Net>();
  auto model = strategy.prepare(net);
  const auto means = [&] {
    return strategy.run([&](const at::Tensor&) { return model->norm->running_mean.clone(); }, batch());
  };
  const auto expected = at::full({4}, 3.0);
  net->norm->running_mean.copy_(expected);
  net->register_module("extra", nn::Linear(1, 1));
  CHECK_THROWS_AS(means(), InvalidArgument);
  net->unregister_module("extra");
  for (const auto& mean : means()) CHECK(mean.equal(expected));
}

TEST_CASE("modules that every replica registers when it is called are taken up", "[strategy]") {
  struct Lazy : nn::Cloneable<Lazy> {
    Lazy() { reset(); }
    void reset() override { head = register_module("head", nn::Linear(4, 1)); }
    at::Tensor forward(const at::Tensor& x) {
      if (!noise) noise = register_module("noise", nn::Dropout(0.5));
      return noise->forward(head->forward(x));
    }
    nn::Linear head{nullptr};
    nn::Dropout noise{nullptr};
  };
  MirroredStrategy strategy(cpus(2));
  const auto net = std::make_shared<Lazy>();
  auto model = strategy.prepare(net);
  const auto modes = [&] {
    return strategy.run(
        [&](const at::Tensor& x) {
          model->forward(x);
          return at::scalar_tensor(model->noise->is_training());
        },
        batch());
  };
  modes();
  net->eval();
  for (const auto& mode : modes()) CHECK(!mode.item<bool>());
}

TEST_CASE("a PerReplica that a program makes is reduced and gathered", "[strategy]") {
  MirroredStrategy strategy(cpus(2));
  const PerReplica<at::Tensor> values({at::ones({2}), at::ones({2}) * 3});
  CHECK(strategy.reduce(values, ReduceOp::sum).equal(at::ones({2}) * 4));
  CHECK(strategy.gather(values).equal(at::cat({at::ones({2}), at::ones({2}) * 3})));
}

TEST_CASE("threads that run no replica keep their intra-op threads", "[strategy]") {
  const int outside = at::get_num_threads();
  at::set_num_threads(outside);  // what threads that are new to torch get
  int of_maker = 0;
  std::thread([&] {
    StrategyOptions options;
    options.threads_per_replica = outside + 1;
    MirroredStrategy strategy(cpus(2), options);
    auto model = strategy.prepare([] { return linear(); });
    strategy.step([&](const at::Tensor& x) { return model->forward(x).square().mean(); }, batch());
    of_maker = at::get_num_threads();
  }).join();
  CHECK(of_maker == outside);
  int of_later_thread = 0;
  std::thread([&] { of_later_thread = at::get_num_threads(); }).join();
  CHECK(of_later_thread == outside);
}

TEST_CASE("a forked child ends, and is told that it has no replicas", "[strategy]") {
  auto strategy = std::make_unique<MirroredStrategy>(cpus(2));
  auto model = strategy->prepare([] { return linear(); });
  const auto step = [&] {
    return strategy->step([&](const at::Tensor& x) { return model->forward(x).square().mean(); }, batch());
  };
  step();
  CHECK(exit_code_of_child([&] {
          strategy.reset();
          return 7;
        }) == 7);
  CHECK(exit_code_of_child(
            [&] { return contains(message_of<InvalidArgument>(step), "forked child has no threads") ? 7 : 8; }) == 7);
  CHECK(strategy != nullptr);
  step();
}

TEST_CASE("a forked child trains with a strategy of its own", "[strategy]") {
  const auto train = [] {
    MirroredStrategy strategy(cpus(2), {.threads_per_replica = 1});
    auto model = strategy.prepare([] { return linear(); });
    strategy.step([&](const at::Tensor& x) { return model->forward(x).square().mean(); }, batch());
    return 7;
  };
  train();
  for (int i = 0; i < 20; ++i) REQUIRE(exit_code_of_child(train) == 7);
}

TEST_CASE("backward() in run() is refused there", "[strategy]") {
  MirroredStrategy strategy(cpus(GENERATE(1, 2)));
  auto model = strategy.prepare([] { return linear(); });
  muster::optim::SGD optimizer(model->parameters(), 0.1);
  strategy.prepare(optimizer);
  const auto loss = [&](const at::Tensor& x) { return model->forward(x).square().mean(); };
  strategy.step(loss, batch());
  CHECK(contains(message_of<InvalidArgument>([&] {
                   strategy.run(
                       [&](const at::Tensor& x) {
                         const at::AutoGradMode grad(true);
                         loss(x).backward();
                         return 1;
                       },
                       batch());
                 }),
                 "backward() was called inside run()"));
  CHECK(strategy.step(loss, batch()).stepped);
  const auto saliency = strategy.run(
      [&](const at::Tensor& x) {
        const at::AutoGradMode grad(true);
        const auto input = x.detach().requires_grad_();
        return torch::autograd::grad({loss(input)}, {input}).front();
      },
      batch());
  CHECK(saliency[0].abs().sum().item<float>() > 0);
}

TEST_CASE("an optimizer that is stepped by hand is seen to", "[strategy]") {
  std::vector<std::string> warnings;
  set_log_sink([&](LogLevel, const std::string& text) {
    if (contains(text, "no optimizer is prepared")) warnings.push_back(text);
  });
  MirroredStrategy strategy;
  auto model = strategy.prepare([] { return linear(); });
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const auto step = [&] {
    strategy.step([&](const at::Tensor& x) { return model->forward(x).square().mean(); }, batch());
  };
  for (int i = 0; i < 3; ++i) {
    step();
    optimizer.step();
  }
  const bool is_quiet = warnings.empty();
  step();
  step();
  set_log_sink({});
  CHECK(is_quiet);
  CHECK(warnings.size() == 1);
}

TEST_CASE("what cannot travel is refused in words", "[strategy]") {
  MirroredStrategy strategy;
  const auto sparse = at::ones({2, 2}).to_sparse();
  CHECK(contains(message_of<InvalidArgument>([&] { strategy.reduce(sparse); }), "to_dense()"));
  CHECK(contains(message_of<InvalidArgument>([&] { strategy.broadcast(at::Tensor()); }), "undefined"));
  CHECK(contains(message_of<InvalidArgument>([&] { strategy.save(""); }), "empty path"));
  CHECK(contains(message_of<InvalidArgument>([&] { strategy.load(""); }), "empty path"));
}

TEST_CASE("an optimizer of muster::optim that is gone is named", "[strategy]") {
  MirroredStrategy strategy(cpus(1));
  auto model = strategy.prepare(linear());
  const auto step = [&] { strategy.step([&](const at::Tensor& x) { return model->forward(x).mean(); }, batch()); };
  std::optional<optim::SGD> optimizer;
  optimizer.emplace(model->parameters(), torch::optim::SGDOptions(0.1));
  strategy.prepare(*optimizer);
  step();
  optimizer.reset();
  CHECK_THROWS_WITH(step(), ContainsSubstring("optimizer 0, which was prepared, is gone"));
  CHECK_THROWS_WITH(strategy.save("nowhere"), ContainsSubstring("is gone"));
  optimizer.emplace(model->parameters(), torch::optim::SGDOptions(0.1));  // where the first one was
  CHECK_THROWS_AS(step(), InvalidArgument);
  strategy.prepare(*optimizer);
  CHECK_NOTHROW(step());
  optimizer.reset();
  CHECK_NOTHROW(strategy.close());
}

TEST_CASE("modules that were made in inference mode are refused by name", "[strategy]") {
  const int replicas = GENERATE(1, 2);
  MirroredStrategy strategy(cpus(replicas));
  std::shared_ptr<nn::LinearImpl> module;
  {
    const c10::InferenceMode inference;
    module = linear();
    const auto normal = [] {
      const c10::InferenceMode normal_mode(false);
      return linear();
    };
    CHECK_NOTHROW(strategy.prepare(normal()));  // and its copies are
    CHECK_THROWS_WITH(strategy.prepare([] { return linear(); }),
                      ContainsSubstring("'weight' of the module was made in"));
  }
  CHECK_THROWS_WITH(strategy.prepare(module), ContainsSubstring("'weight' of the module was made in inference mode"));
}

TEST_CASE("a weight that is undefined is none; one of several values, or with a gradient, is refused", "[strategy]") {
  MirroredStrategy strategy(cpus(2));
  auto model = strategy.prepare(linear());
  const auto step = [&](const at::Tensor& weight) {
    return strategy.step(
        [&](const at::Tensor& x) {
          Loss loss(model->forward(x).mean());
          loss.weight = weight;
          return loss;
        },
        batch());
  };
  CHECK(step(at::Tensor()).weight.item<double>() == 8);
  CHECK_THROWS_WITH(step(at::ones({3})), ContainsSubstring("the weight of a Loss is a tensor of 3 values"));
  CHECK_THROWS_WITH(step(at::ones({}).requires_grad_()), ContainsSubstring("requires a gradient"));
}

namespace {

using Sample = torch::data::Example<>;

// Leaves out samples that are damaged: all but the first of each three.
struct Filtered : torch::data::datasets::BatchDataset<Filtered, Sample> {
  Sample get_batch(torch::ArrayRef<size_t> indices) override {
    std::vector<int64_t> left;
    for (const size_t i : indices) {
      if (i % 3 == 0) left.push_back(static_cast<int64_t>(i));
    }
    const auto rows = at::tensor(left, at::kLong);
    return {batch().index_select(0, rows), batch().index_select(0, rows)};
  }
  std::optional<size_t> size() const override { return 6; }
};

}  // namespace

TEST_CASE("a loss that counts for samples which a data set left out is told of, once", "[strategy]") {
  const bool is_weighted = GENERATE(false, true);
  std::vector<std::string> said;
  set_log_sink([&](LogLevel level, const std::string& text) {
    if (level == LogLevel::warning) said.push_back(text);
  });
  {
    MirroredStrategy strategy(cpus(2));
    auto model = strategy.prepare(linear());
    auto loader = strategy.prepare_loader(Filtered(), {.batch_size = 6});
    optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    strategy.prepare(optimizer);
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (auto& parts : loader) {
        strategy.step(
            [&](const Sample& part) {
              Loss loss((model->forward(part.data) - part.target).square().mean());
              if (is_weighted) loss.weight = at::scalar_tensor(part.data.size(0));
              return loss;
            },
            parts);
      }
    }
  }
  set_log_sink({});
  if (is_weighted) {
    CHECK(said.empty());
  } else {
    REQUIRE(said.size() == 1);
    CHECK(contains(said.front(), "a part of 3 samples was read as 1 rows"));
  }
}
