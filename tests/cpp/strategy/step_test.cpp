// What one training step means, on the replicas of one process.
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <thread>

#include "cpp/catch.h"
#include "cpp/strategy/workers.h"
#include "muster/mirrored.h"
#include "muster/optim.h"

using namespace muster;
using testing::cpus;

namespace {

struct StepNet : torch::nn::Module {
  StepNet()
      : first(register_module("first", torch::nn::Linear(3, 4))),
        last(register_module("last", torch::nn::Linear(4, 1))) {
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) { return last(at::tanh(first(x))).squeeze(1); }

  torch::nn::Linear first;
  torch::nn::Linear last;
};

at::Tensor inputs(int64_t rows) { return at::linspace(-1, 1, rows * 3, at::kDouble).pow(2).view({rows, 3}); }

std::vector<at::Tensor> gradients(const torch::nn::Module& module) {
  std::vector<at::Tensor> found;
  for (const auto& parameter : module.parameters()) {
    found.push_back(parameter.grad().defined() ? parameter.grad().clone() : at::Tensor());
  }
  return found;
}

// The same model without a strategy, and its gradients after `backward`.
template <class Loss>
std::vector<at::Tensor> expected_gradients(const StepNet& model, const Loss& loss) {
  StepNet reference;
  {
    const at::NoGradGuard no_grad;
    for (size_t p = 0; p < reference.parameters().size(); ++p) reference.parameters()[p].copy_(model.parameters()[p]);
  }
  loss(reference).backward();
  return gradients(reference);
}

void check_equal(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  REQUIRE(actual.size() == expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    REQUIRE(actual[i].defined() == expected[i].defined());
    if (actual[i].defined()) CHECK((actual[i] - expected[i]).abs().max().item<double>() < 1e-13);
  }
}

PerReplica<at::Tensor> parts(const std::vector<int64_t>& sizes) {
  int64_t rows = 0;
  for (int64_t size : sizes) rows += size;
  const auto whole = inputs(rows);
  std::vector<at::Tensor> divided;
  int64_t start = 0;
  for (int64_t size : sizes) {
    divided.push_back(whole.narrow(0, start, size));
    start += size;
  }
  return PerReplica<at::Tensor>(divided);
}

}  // namespace

TEST_CASE("uneven parts give the gradient of the whole batch", "[strategy]") {
  const auto sizes = GENERATE(std::vector<int64_t>{9}, std::vector<int64_t>{5, 4}, std::vector<int64_t>{7, 0, 2},
                              std::vector<int64_t>{0, 6, 2, 1});
  MirroredStrategy strategy(cpus(static_cast<int>(sizes.size())));
  auto model = strategy.prepare([] { return StepNet(); });
  const auto result = strategy.step([&](const at::Tensor& x) { return model->forward(x).pow(2).mean(); }, parts(sizes));
  CHECK(result.stepped);
  CHECK(result.step == 1);
  CHECK(result.weight.item<double>() == 9);
  CHECK(result.loss.item<double>() == Approx(model->forward(inputs(9)).pow(2).mean().item<double>()));
  const auto expected =
      expected_gradients(model.module(), [](StepNet& net) { return net.forward(inputs(9)).pow(2).mean(); });
  check_equal(gradients(model.module()), expected);
}

TEST_CASE("with balance, the slower replica gets fewer rows and gradients stay the mean", "[strategy]") {
  MirroredStrategy strategy(cpus(2), {}, Balance::automatic);
  auto model = strategy.prepare([] { return StepNet(); });
  // Replicas meet in the step, so that their whole times are equal.
  const auto loss = [&](const at::Tensor& x) {
    const auto per_row = std::chrono::microseconds(strategy.replica() == 0 ? 1000 : 100);
    std::this_thread::sleep_for(per_row * x.size(0));
    strategy.reduce(x.sum(), ReduceOp::sum);
    return model->forward(x).pow(2).mean();
  };
  for (int i = 0; i < 20; ++i) strategy.step(loss, inputs(16));
  const auto rows = strategy.run([](const at::Tensor& x) { return x.size(0); }, inputs(16));
  CHECK(rows[0] + rows[1] == 16);
  CHECK(rows[0] <= 4);
  CHECK_THAT(strategy.explain(), ContainsSubstring("by capacity"));

  const auto result = strategy.step(loss, inputs(9));
  CHECK(result.weight.item<double>() == 9);
  const auto expected =
      expected_gradients(model.module(), [](StepNet& net) { return net.forward(inputs(9)).pow(2).mean(); });
  check_equal(gradients(model.module()), expected);
}

TEST_CASE("a returned weight replaces the number of samples", "[strategy]") {
  MirroredStrategy strategy(cpus(2));
  auto model = strategy.prepare([] { return StepNet(); });
  // Only rows whose first input exceeds 0.2 count.
  const auto masked = [](StepNet& net, const at::Tensor& x) {
    const auto mask = x.select(1, 0).gt(0.2).to(at::kDouble);
    return std::pair((net.forward(x) * mask).sum() / mask.sum(), mask.sum());
  };
  const auto result = strategy.step(
      [&](const at::Tensor& x) {
        auto [value, weight] = masked(*model, x);
        Loss loss(value);
        loss.weight = weight;
        loss.metrics["first"] = x.select(1, 0).mean();
        return loss;
      },
      parts({6, 3}));
  const auto expected = expected_gradients(model.module(), [&](StepNet& net) { return masked(net, inputs(9)).first; });
  check_equal(gradients(model.module()), expected);
  CHECK(result.weight.item<double>() == masked(model.module(), inputs(9)).second.item<double>());
}

TEST_CASE("a sum is never divided", "[strategy]") {
  MirroredStrategy strategy(cpus(2));
  auto model = strategy.prepare([] { return StepNet(); });
  const auto result = strategy.step(
      [&](const at::Tensor& x) {
        Loss loss(model->forward(x).sum());
        loss.reduction = Reduction::sum;
        return loss;
      },
      parts({6, 3}));
  check_equal(gradients(model.module()),
              expected_gradients(model.module(), [](StepNet& net) { return net.forward(inputs(9)).sum(); }));
  CHECK(result.loss.item<double>() == Approx(model->forward(inputs(9)).sum().item<double>()));
}

TEST_CASE("a window holds several micro-batches", "[strategy]") {
  MirroredStrategy strategy(cpus(2), {.accumulate = 3});
  auto model = strategy.prepare([] { return StepNet(); });
  torch::optim::SGD optimizer(model->parameters(), 0.5);
  CHECK(&strategy.prepare(optimizer) == &optimizer);
  const auto before = model->parameters()[0].clone();
  const auto fn = [&](const at::Tensor& x) { return model->forward(x).pow(2).mean(); };
  const auto whole = inputs(10);

  const auto expected =
      expected_gradients(model.module(), [&](StepNet& net) { return net.forward(whole).pow(2).mean(); });
  auto result = strategy.step(fn, whole.narrow(0, 0, 4));
  CHECK_FALSE(result.stepped);
  CHECK(result.weight.item<double>() == 4);
  CHECK_FALSE(result.grad_norm.defined());
  CHECK_FALSE(strategy.step(fn, whole.narrow(0, 4, 5)).stepped);
  CHECK(model->parameters()[0].equal(before));
  result = strategy.step(fn, whole.narrow(0, 9, 1));
  CHECK(result.stepped);
  CHECK(result.weight.item<double>() == 10);
  check_equal(gradients(model.module()), expected);
  CHECK((before - 0.5 * expected[0] - model->parameters()[0]).abs().max().item<double>() < 1e-13);
  CHECK_FALSE(strategy.flush().has_value());

  strategy.step(fn, whole);
  const auto flushed = strategy.flush();
  REQUIRE(flushed.has_value());
  CHECK(flushed->stepped);
  CHECK(flushed->step == 2);
  CHECK(strategy.steps() == 2);
}

TEST_CASE("the norm is clipped after the reduction", "[strategy]") {
  MirroredStrategy strategy(cpus(2), {.clip_norm = 0.01});
  auto model = strategy.prepare([] { return StepNet(); });
  const auto loss = [](StepNet& net, const at::Tensor& x) { return (net.forward(x) - 5).pow(2).mean(); };
  const auto result = strategy.step([&](const at::Tensor& x) { return loss(*model, x); }, parts({2, 1}));
  double expected = 0;
  for (const auto& gradient : expected_gradients(model.module(), [&](StepNet& net) { return loss(net, inputs(3)); })) {
    expected += gradient.pow(2).sum().item<double>();
  }
  CHECK(result.grad_norm.item<double>() == Approx(std::sqrt(expected)));
  double clipped = 0;
  for (const auto& gradient : gradients(model.module())) clipped += gradient.pow(2).sum().item<double>();
  CHECK(std::sqrt(clipped) == Approx(0.01).epsilon(1e-3));
}

TEST_CASE("gradients are clipped by a norm of any type, or by value", "[strategy]") {
  const double infinity = std::numeric_limits<double>::infinity();
  StrategyOptions options;
  SECTION("the sum of magnitudes") {
    options.clip_norm = 0.01;
    options.clip_norm_type = 1;
  }
  SECTION("another type") {
    options.clip_norm = 0.01;
    options.clip_norm_type = 2.5;
  }
  SECTION("the largest magnitude") {
    options.clip_norm = 0.01;
    options.clip_norm_type = infinity;
  }
  SECTION("by value") { options.clip_value = 0.05; }
  MirroredStrategy strategy(cpus(2), options);
  auto model = strategy.prepare([] { return StepNet(); });
  const auto loss = [](StepNet& net, const at::Tensor& x) { return (net.forward(x) - 5).pow(2).mean(); };
  const auto result = strategy.step([&](const at::Tensor& x) { return loss(*model, x); }, parts({2, 1}));
  const auto expected = expected_gradients(model.module(), [&](StepNet& net) { return loss(net, inputs(3)); });
  std::vector<at::Tensor> flat;
  for (const auto& gradient : expected) flat.push_back(gradient.flatten());
  const double norm = at::linalg_vector_norm(at::cat(flat), options.clip_norm_type).item<double>();
  CHECK(result.grad_norm.item<double>() == Approx(norm).epsilon(1e-9));
  const double factor = options.clip_norm ? *options.clip_norm / (norm + 1e-6) : 1;
  CHECK(factor <= 1);
  const double bound = options.clip_value.value_or(infinity);
  CHECK(at::cat(flat).abs().max().item<double>() > 0.05);
  const auto clipped = gradients(model.module());
  for (size_t i = 0; i < expected.size(); ++i) {
    CHECK(at::allclose(clipped[i], (expected[i] * factor).clamp(-bound, bound), 1e-9, 0));
  }
  StrategyOptions both;
  both.clip_norm = both.clip_value = 1;
  CHECK_THROWS_AS(MirroredStrategy(cpus(1), both), InvalidArgument);
}

TEST_CASE("metrics are averaged by weight and outputs come back by replica", "[strategy]") {
  MirroredStrategy strategy(cpus(3));
  auto model = strategy.prepare([] { return StepNet(); });
  const auto result = strategy.step(
      [&](const at::Tensor& x) {
        Loss loss(model->forward(x).mean());
        loss.metrics["rows"] = at::scalar_tensor(static_cast<double>(x.size(0)), at::kDouble);
        loss.output = c10::IValue(int64_t{strategy.replica()});
        return loss;
      },
      parts({3, 0, 1}));
  CHECK(result.metrics.at("rows").item<double>() == Approx((3 * 3 + 1 * 1) / 4.0));
  CHECK(result.output[0].toInt() == 0);
  CHECK(result.output[1].isNone());
  CHECK(result.output[2].toInt() == 2);
}

TEST_CASE("an exception in a step drops the window and nothing else", "[strategy]") {
  struct Mine : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  const int accumulate = GENERATE(1, 2);
  MirroredStrategy strategy(cpus(2), {.accumulate = accumulate});
  auto model = strategy.prepare([] { return StepNet(); });
  torch::optim::SGD optimizer(model->parameters(), 0.5);
  strategy.prepare(optimizer);
  const auto before = model->parameters()[0].clone();
  const auto good = [&](const at::Tensor& x) { return model->forward(x).mean(); };
  const auto bad = [&](const at::Tensor& x) {
    if (strategy.replica() == 1) throw Mine("replica 1 does not like this");
    return good(x);
  };
  CHECK_THROWS_AS(strategy.step(bad, parts({2, 2})), Mine);
  CHECK(strategy.steps() == 0);
  CHECK(model->parameters()[0].equal(before));
  for (int i = 1; i < accumulate; ++i) CHECK_FALSE(strategy.step(good, parts({2, 2})).stepped);
  for (int i = 0; i < accumulate; ++i) strategy.step(good, parts({2, 2}));
  CHECK(strategy.steps() == 1);
  CHECK_FALSE(model->parameters()[0].equal(before));
}

TEST_CASE("what a step function may not do is refused", "[strategy]") {
  MirroredStrategy strategy(cpus(2));
  auto model = strategy.prepare([] { return StepNet(); });
  const auto batch = parts({2, 2});
  CHECK_THROWS_WITH(strategy.step(
                        [&](const at::Tensor& x) {
                          auto loss = model->forward(x).mean();
                          loss.backward();
                          return loss;
                        },
                        batch),
                    ContainsSubstring("backward"));
  CHECK_THROWS_WITH(strategy.step([&](const at::Tensor& x) { return model->forward(x); }, batch),
                    ContainsSubstring("0-dim"));
  CHECK_THROWS_WITH(strategy.step([&](const at::Tensor& x) { return x.mean(); }, batch),
                    ContainsSubstring("requires a gradient"));
  CHECK_THROWS_WITH(strategy.step(
                        [&](const at::Tensor& x) {
                          strategy.flush();
                          return model->forward(x).mean();
                        },
                        batch),
                    ContainsSubstring("inside a step"));
  CHECK(strategy.step([&](const at::Tensor& x) { return model->forward(x).mean(); }, batch).stepped);
}

TEST_CASE("unused parameters need no flag", "[strategy]") {
  MirroredStrategy strategy(cpus(2));
  auto model = strategy.prepare([] { return StepNet(); });
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).weight_decay(0.5));
  strategy.prepare(optimizer);
  const auto before = model->last->weight.detach().clone();
  const bool used_somewhere = GENERATE(false, true);
  strategy.step(
      [&](const at::Tensor& x) {
        auto loss = model->first(x).mean();
        return used_somewhere && strategy.replica() == 1 ? loss + model->last->weight.sum() : loss;
      },
      parts({2, 2}));
  CHECK(model->first->weight.grad().defined());
  CHECK(model->last->weight.grad().defined() == used_somewhere);
  if (used_somewhere) {
    CHECK(model->last->weight.grad().allclose(at::ones({1, 4}, at::kDouble) * 0.5));
  } else {
    CHECK(model->last->weight.equal(before));
  }
  CHECK_FALSE(model->last->bias.grad().defined());
}

TEST_CASE("optimizers= says whose parameters take part", "[strategy]") {
  MirroredStrategy strategy(cpus(2));
  auto generator = strategy.prepare([] { return StepNet(); });
  auto critic = strategy.prepare([] { return StepNet(); });
  torch::optim::SGD generator_optimizer(generator->parameters(), 0.1);
  torch::optim::Adagrad critic_optimizer(critic->parameters(), 0.1);
  strategy.prepare(generator_optimizer);
  strategy.prepare(critic_optimizer);
  const auto fn = [&](const at::Tensor& x) { return (critic->forward(x) + generator->forward(x)).pow(2).mean(); };
  const auto generator_before = generator->parameters()[0].clone();
  const auto critic_before = critic->parameters()[0].clone();
  strategy.step(fn, parts({2, 2}), {.optimizers = {critic_optimizer}});
  CHECK(generator->parameters()[0].equal(generator_before));
  CHECK_FALSE(critic->parameters()[0].equal(critic_before));
  CHECK_FALSE(generator->parameters()[0].grad().defined());
  strategy.step(fn, parts({2, 2}), {.optimizers = {generator_optimizer}});
  CHECK_FALSE(generator->parameters()[0].equal(generator_before));
  CHECK_THROWS_WITH(strategy.step(fn, parts({2, 2})), ContainsSubstring("this step names none"));

  torch::optim::SGD unprepared(critic->parameters(), 0.1);
  CHECK_THROWS_WITH(strategy.step(fn, parts({2, 2}), {.optimizers = {unprepared}}), ContainsSubstring("not prepared"));
}

TEST_CASE("optimizers over some of the same parameters step in turns", "[strategy]") {
  const int replicas = GENERATE(1, 2);
  const auto make = [] {
    torch::manual_seed(3);
    return torch::nn::Sequential(torch::nn::Linear(3, 4), torch::nn::Linear(4, 1));
  };
  const auto x = at::arange(12, at::kFloat).view({4, 3}).sin();
  auto plain = make();
  optim::SGD plain_head(plain[1]->as<torch::nn::Linear>()->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  optim::AdamW plain_all(plain->parameters(), torch::optim::AdamWOptions(0.01));
  StrategyOptions options;
  options.accumulate = GENERATE(1, 2);
  MirroredStrategy strategy(cpus(replicas), options);
  auto model = strategy.prepare(make);
  const auto head_parameters = model.module()[1]->as<torch::nn::Linear>()->parameters();
  optim::SGD head(head_parameters, torch::optim::SGDOptions(0.1).momentum(0.9));
  strategy.prepare(head);
  const auto step = [&](torch::optim::Optimizer& of) {
    StepOptions which;
    which.optimizers = {of};
    return strategy.step([&](const at::Tensor& part) { return model->forward(part).square().mean(); }, x, which);
  };
  const auto plain_step = [&](torch::optim::Optimizer& of) {
    plain->zero_grad();
    plain->forward(x).square().mean().backward();
    of.step();
  };
  optim::AdamW all(model->parameters(), torch::optim::AdamWOptions(0.01));
  strategy.prepare(all);
  const auto step_all = [&] {
    strategy.step([&](const at::Tensor& part) { return model->forward(part).square().mean(); }, x);
  };
  CHECK_THROWS_WITH(step_all(), ContainsSubstring("belongs to two optimizers"));
  for (auto [of, plain_of] : {std::pair<torch::optim::Optimizer*, torch::optim::Optimizer*>(&head, &plain_head),
                              {&head, &plain_head},
                              {&all, &plain_all},
                              {&all, &plain_all},
                              {&head, &plain_head},
                              {&all, &plain_all}}) {
    for (int i = 0; i < options.accumulate; ++i) CHECK(step(*of).stepped == (i + 1 == options.accumulate));
    plain_step(*plain_of);
  }
  const auto parameters = model->parameters();
  for (size_t p = 0; p < parameters.size(); ++p) CHECK(at::allclose(parameters[p], plain->parameters()[p], 1e-5, 1e-6));
  if (options.accumulate == 1) return;
  step(head);
  CHECK_THROWS_WITH(step(all), ContainsSubstring("whose window of several micro-batches is open"));
  strategy.flush();
  optim::AdamW again(model->parameters(), torch::optim::AdamWOptions(0.01));
  strategy.prepare(again);
  CHECK_FALSE(step(all).stepped);
  CHECK_THROWS_WITH(step(again), ContainsSubstring("other optimizers= of the same parameters opened a window"));
  CHECK(step(all).stepped);
  CHECK_FALSE(step(again).stepped);
  CHECK(step(again).stepped);
}

TEST_CASE("optimizers that cannot train are refused", "[strategy]") {
  MirroredStrategy strategy;
  auto model = strategy.prepare([] { return StepNet(); });
  torch::optim::SGD empty(std::vector<at::Tensor>{}, 0.1);
  CHECK_THROWS_WITH(strategy.prepare(empty), ContainsSubstring("no parameters"));
  StepNet stranger;
  torch::optim::SGD foreign(stranger.parameters(), 0.1);
  strategy.prepare(foreign);
  CHECK_THROWS_WITH(strategy.step([&](const at::Tensor& x) { return model->forward(x).mean(); }, inputs(2)),
                    ContainsSubstring("no prepared module"));
}

TEST_CASE("add_param_group takes effect at the next window", "[strategy]") {
  MirroredStrategy strategy(cpus(2));
  auto model = strategy.prepare([] { return StepNet(); });
  torch::optim::SGD optimizer(model->first->parameters(), 0.1);
  strategy.prepare(optimizer);
  const auto fn = [&](const at::Tensor& x) { return model->forward(x).pow(2).mean(); };
  strategy.step(fn, parts({2, 2}));
  CHECK_FALSE(model->last->weight.grad().defined());
  optimizer.add_param_group(torch::optim::OptimizerParamGroup(model->last->parameters()));
  strategy.step(fn, parts({2, 2}));
  CHECK(model->last->weight.grad().defined());
}

TEST_CASE("buffers become the mean over replicas by weight", "[strategy]") {
  MirroredStrategy strategy(cpus(2));
  auto model = strategy.prepare(torch::nn::Sequential(
      torch::nn::Linear(3, 2), torch::nn::BatchNorm1d(torch::nn::BatchNormOptions(2).momentum(1.0))));
  const auto& norm = model.module()[1]->as<torch::nn::BatchNorm1d>()->running_mean;
  const auto whole = inputs(5).to(at::kFloat);
  const auto hidden = model.module()[0]->as<torch::nn::Linear>()->forward(whole);
  strategy.step([&](const at::Tensor& x) { return model->forward(x).pow(2).sum(); },
                PerReplica<at::Tensor>({whole.narrow(0, 0, 3), whole.narrow(0, 3, 2)}));
  CHECK(norm.allclose(hidden.mean(0), 1e-5, 1e-6));

  // Replicas take over what is done to replica 0's between steps.
  model->eval();
  {
    const at::NoGradGuard no_grad;
    norm.fill_(3);
  }
  const auto outputs =
      strategy.run([&](const at::Tensor& x) { return model->forward(x); }, PerReplica<at::Tensor>({whole, whole}));
  CHECK(outputs[0].equal(outputs[1]));
  CHECK(norm.eq(3).all().item<bool>());
}

TEST_CASE("reduce inside a step is differentiable", "[strategy]") {
  MirroredStrategy strategy(cpus(3));
  auto model = strategy.prepare([] { return StepNet(); });
  // The variance over the whole batch: every sample's gradient depends on all others.
  strategy.step(
      [&](const at::Tensor& x) {
        const auto y = model->forward(x);
        const auto mean = strategy.reduce(y.mean());
        return (y - mean).pow(2).mean();
      },
      parts({4, 0, 2}));
  check_equal(gradients(model.module()), expected_gradients(model.module(), [](StepNet& net) {
                const auto y = net.forward(inputs(6));
                return (y - y.mean()).pow(2).mean();
              }));
}

TEST_CASE("gather and broadcast act between the replicas of a step", "[strategy]") {
  MirroredStrategy strategy(cpus(2));
  auto model = strategy.prepare([] { return StepNet(); });
  strategy.step(
      [&](const at::Tensor& x) {
        const auto rows = strategy.gather(at::scalar_tensor(static_cast<double>(x.size(0)), at::kDouble));
        const auto source =
            strategy.broadcast(at::scalar_tensor(static_cast<double>(strategy.replica()), at::kDouble), 1);
        if (!rows.equal(at::tensor({2.0, 1.0}, at::kDouble))) throw std::logic_error("gather");
        if (source.item<double>() != 1) throw std::logic_error("broadcast");
        return model->forward(x).mean();
      },
      parts({2, 1}));
  CHECK(strategy.steps() == 1);
}

TEST_CASE("random streams belong to replica and step", "[strategy]") {
  const auto draws = [](int replicas, uint64_t seed) {
    MirroredStrategy strategy(cpus(replicas), {.seed = seed});
    std::vector<std::vector<at::Tensor>> drawn;
    for (int t = 0; t < 2; ++t) {
      const auto values =
          strategy.run([](const at::Tensor&) { return at::rand({5}); },
                       PerReplica<at::Tensor>(std::vector<at::Tensor>(static_cast<size_t>(replicas), at::zeros({1}))));
      drawn.push_back(values.parts());
    }
    return drawn;
  };
  const auto ambient = at::globalContext().defaultGenerator(at::kCPU).get_state();
  const auto two = draws(2, 5);
  CHECK(at::globalContext().defaultGenerator(at::kCPU).get_state().equal(ambient));
  CHECK_FALSE(two[0][0].equal(two[0][1]));
  CHECK_FALSE(two[0][0].equal(two[1][0]));
  const auto three = draws(3, 5);
  for (size_t t = 0; t < 2; ++t) {
    for (size_t r = 0; r < 2; ++r) CHECK(two[t][r].equal(three[t][r]));
  }
  CHECK_FALSE(draws(1, 6)[0][0].equal(two[0][0]));
}

TEST_CASE("stop() is seen at a window's end", "[strategy]") {
  MirroredStrategy strategy(cpus(2));
  auto model = strategy.prepare([] { return StepNet(); });
  const auto fn = [&](const at::Tensor& x) { return model->forward(x).mean(); };
  strategy.step(fn, parts({1, 1}));
  CHECK_FALSE(strategy.stopping());
  strategy.stop();
  CHECK_FALSE(strategy.stopping());
  strategy.step(fn, parts({1, 1}));
  CHECK(strategy.stopping());
}

TEST_CASE("a gradient that is not finite skips the update", "[strategy]") {
  MirroredStrategy strategy(cpus(2), {.max_skipped = 2});
  auto model = strategy.prepare([] { return StepNet(); });
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  strategy.prepare(optimizer);
  const auto before = model->parameters()[0].clone();
  const auto fn = [&](const at::Tensor& x) {
    return model->forward(x).mean() * std::numeric_limits<double>::infinity();
  };
  CHECK(strategy.step(fn, parts({1, 1})).skipped.item<bool>());
  CHECK(model->parameters()[0].equal(before));
  CHECK_THROWS_AS(strategy.step(fn, parts({1, 1})), NonFinite);
}
