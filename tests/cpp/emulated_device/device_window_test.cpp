// A window whose numbers stay on the device is the one that the host counts, bit for bit.
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/polar.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tanh.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cpp/catch.h"
#include "device/device.h"
#include "muster/error.h"
#include "muster/mirrored.h"
#include "muster/optim.h"
#include "muster/per_replica.h"

using namespace muster;

namespace {

// Sizes that are no multiple of anything; the batch norm has buffers.
struct Net : torch::nn::Module {
  Net()
      : first(register_module("first", torch::nn::Linear(7, 33))),
        norm(register_module("norm", torch::nn::BatchNorm1d(33))),
        last(register_module("last", torch::nn::Linear(33, 5))),
        unused(register_module("unused", torch::nn::Linear(2, 2))) {}
  at::Tensor forward(const at::Tensor& x) { return last(at::tanh(norm(first(x)))); }

  torch::nn::Linear first;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear last;
  torch::nn::Linear unused;
};

at::Tensor batch(int64_t rows, int step) {
  return at::linspace(-1, 1 + step, rows * 7, at::kFloat).sin().view({rows, 7});
}

// In equal parts, larger first; one that is too small for that goes to the first replica whole.
PerReplica<at::Tensor> parts_of(const at::Tensor& whole, int replicas) {
  std::vector<at::Tensor> parts;
  int64_t start = 0;
  for (int64_t r = 0; r < replicas; ++r) {
    int64_t rows = whole.size(0) / replicas + (r < whole.size(0) % replicas ? 1 : 0);
    if (whole.size(0) < 2 * replicas) rows = r == 0 ? whole.size(0) : 0;
    parts.push_back(whole.narrow(0, start, rows).clone());
    start += rows;
  }
  return PerReplica<at::Tensor>(std::move(parts));
}

using StepFunction = std::function<Loss(Net& net, const at::Tensor& x, int step)>;
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

Loss plain_loss(Net& net, const at::Tensor& x, int) { return net.forward(x).square().mean(); }

template <class O, class Options>
MakeOptimizer optimizer(const Options& options) {
  return [options](const std::vector<at::Tensor>& parameters) { return std::make_unique<O>(parameters, options); };
}

MakeOptimizer adamw() { return optimizer<optim::AdamW>(torch::optim::AdamWOptions(1e-2).weight_decay(0.1)); }

// What a run leaves, in numbers.
struct Outcome {
  std::vector<at::Tensor> tensors;    // parameters, buffers
  std::vector<at::Tensor> gradients;  // of the last step, undefined ones left out
  std::vector<std::vector<double>> results;
  std::vector<std::map<std::string, double>> metrics;
};

struct Job {
  int replicas = 2;
  StrategyOptions options{};
  MakeOptimizer make_optimizer = adamw();
  StepFunction step = plain_loss;
  std::vector<int64_t> rows = {9, 9, 6, 9, 2, 9};  // 2: of two or more replicas, one has a part
};

Outcome run(const Job& job, bool on_device) {
  play_streams_on_cpu(on_device);
  Outcome outcome;
  {
    torch::manual_seed(1);
    MirroredStrategy strategy(std::vector<std::string>(static_cast<size_t>(job.replicas), "cpu"), job.options);
    auto model = strategy.prepare([] { return Net(); });
    const auto optimizer = job.make_optimizer(model->parameters());
    strategy.prepare(*optimizer);
    for (size_t s = 0; s < job.rows.size(); ++s) {
      const auto result = strategy.step([&](const at::Tensor& x) { return job.step(*model, x, static_cast<int>(s)); },
                                        parts_of(batch(job.rows[s], static_cast<int>(s)), job.replicas));
      std::vector<double> numbers{static_cast<double>(result.stepped), static_cast<double>(result.step)};
      for (const auto& tensor : {result.loss, result.weight, result.grad_norm, result.skipped, result.loss_scale}) {
        numbers.push_back(tensor.defined() ? tensor.item<double>() : -1);
      }
      outcome.results.push_back(numbers);
      outcome.metrics.emplace_back();
      for (const auto& [name, value] : result.metrics) outcome.metrics.back()[name] = value.item<double>();
    }
    for (const auto& parameter : model->parameters()) {
      outcome.tensors.push_back(parameter.detach().clone());
      if (parameter.grad().defined()) outcome.gradients.push_back(parameter.grad().clone());
    }
    for (const auto& buffer : model->buffers()) outcome.tensors.push_back(buffer.clone());
  }
  play_streams_on_cpu(true);
  return outcome;
}

constexpr size_t kGradNorm = 4;  // in Outcome::results

bool same(double a, double b, double tolerance = 0) {
  return a == b || (std::isnan(a) && std::isnan(b)) || std::abs(a - b) <= tolerance * std::abs(b);
}

void check_same(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  REQUIRE(actual.size() == expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    INFO("tensor " << i);
    CHECK(actual[i].equal(expected[i]));
  }
}

void check_same(const Outcome& actual, const Outcome& expected, double norm_tolerance = 0) {
  check_same(actual.tensors, expected.tensors);
  check_same(actual.gradients, expected.gradients);
  for (size_t s = 0; s < expected.results.size(); ++s) {
    for (size_t i = 0; i < expected.results[s].size(); ++i) {
      INFO("step " << s << ", number " << i << ": " << actual.results[s][i] << " is not " << expected.results[s][i]);
      CHECK(same(actual.results[s][i], expected.results[s][i], i == kGradNorm ? norm_tolerance : 0));
    }
    CHECK(actual.metrics[s] == expected.metrics[s]);
  }
}

void check_job(const Job& job, double norm_tolerance = 0) {
  check_same(run(job, true), run(job, false), norm_tolerance);
}

// The host takes this norm of the means, the device of the sums.
constexpr double kNormOfSums = 1e-6;

}  // namespace

TEST_CASE("a device's windows are the host's, bit for bit", "[device]") {
  Job job;
  job.replicas = GENERATE(1, 2, 3);
  job.options.accumulate = GENERATE(1, 3);
  SECTION("not clipped") {}
  SECTION("clipped by the norm") {
    job.options.clip_norm = 0.05;
    job.options.clip_norm_type = GENERATE(2.0, 1.0, 3.5, double{INFINITY});
  }
  SECTION("clipped by value") { job.options.clip_value = 0.01; }
  check_job(job);
}

TEST_CASE("each flat optimizer steps on a device as on the host", "[device]") {
  Job job;
  job.options.keep_gradients = GENERATE(false, true);
  SECTION("sgd") {
    job.make_optimizer = optimizer<optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
  }
  SECTION("adagrad") { job.make_optimizer = optimizer<optim::Adagrad>(torch::optim::AdagradOptions(0.1)); }
  SECTION("adam") { job.make_optimizer = optimizer<optim::Adam>(torch::optim::AdamOptions(0.01).amsgrad(true)); }
  check_job(job);
}

TEST_CASE("an optimizer that is not flat steps from the mean", "[device]") {
  Job job;
  job.make_optimizer = optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1));
  job.options.accumulate = GENERATE(1, 2);
  SECTION("not clipped") {}
  SECTION("clipped by value") { job.options.clip_value = 0.01; }
  check_job(job, kNormOfSums);
}

TEST_CASE("an optimizer that is not flat is not called for a gradient that is not finite", "[device]") {
  Job job;
  job.make_optimizer = optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1));
  job.step = [](Net& net, const at::Tensor& x, int step) -> Loss {
    return plain_loss(net, x, step).value * (step == 2 ? std::numeric_limits<double>::infinity() : 1.0);
  };
  check_job(job, kNormOfSums);
}

TEST_CASE("low precision, loss scales and overflows are the host's", "[device]") {
  Job job;
  job.options.precision = GENERATE(Precision::bf16, Precision::fp16);
  job.options.accumulate = GENERATE(1, 2);
  job.options.loss_scale = LossScale{.init = 65536, .growth = 2, .backoff = 0.5, .interval = 2};
  job.step = [](Net& net, const at::Tensor& x, int step) -> Loss {
    // The second window overflows.
    const auto value = net.forward(x).to(at::kFloat).square().mean();
    return step == 2 || step == 3 ? value * 1e30 * 1e30 : value;
  };
  check_job(job);
}

TEST_CASE("gradients that travel as bf16 are rounded on a device as on the host", "[device]") {
  Job job;
  job.options.wire = Wire::bf16;
  job.options.keep_gradients = true;  // so that all replicas get the sum on the host, too
  job.options.accumulate = GENERATE(1, 2);
  check_job(job);
  Job exact = job;
  exact.options.wire = Wire::exact;
  CHECK_FALSE(run(job, true).tensors.front().equal(run(exact, true).tensors.front()));
}

TEST_CASE("weights and metrics of a device are the host's", "[device]") {
  Job job;
  job.options.accumulate = GENERATE(1, 2);
  job.step = [](Net& net, const at::Tensor& x, int step) -> Loss {
    Loss loss(plain_loss(net, x, step).value);
    loss.weight = x.select(1, 0).gt(0).sum();
    loss.metrics["mean"] = x.mean();
    if (step > 1) loss.metrics["late"] = x.sum();
    return loss;
  };
  job.rows = {9, 9, 8, 9, 9, 9};
  check_job(job);
}

TEST_CASE("a metric of one replica alone is its own", "[device]") {
  Job job;
  job.step = [](Net& net, const at::Tensor& x, int step) -> Loss {
    Loss loss(plain_loss(net, x, step).value);
    if (x.size(0) == 5) loss.metrics["alone"] = at::scalar_tensor(3, at::kLong);
    return loss;
  };
  job.rows = {9};
  for (const bool on_device : {false, true}) CHECK(run(job, on_device).metrics.front().at("alone") == 3);
}

TEST_CASE("a loss that is a sum is not divided on a device", "[device]") {
  Job job;
  job.step = [](Net& net, const at::Tensor& x, int) {
    Loss loss(net.forward(x).square().sum());
    loss.reduction = Reduction::sum;
    return loss;
  };
  check_job(job);
}

TEST_CASE("a part of weight 0 leaves no trace, not even a NaN", "[device]") {
  const auto with_second = [](double second) {
    Job job;
    job.rows = {8, 8, 8};
    job.step = [second](Net& net, const at::Tensor& x, int step) -> Loss {
      Loss loss(plain_loss(net, x, step).value);
      const bool is_second = step == 1 && x[0][0].item<float>() != batch(8, 1)[0][0].item<float>();
      if (is_second) loss.value = loss.value * second;
      loss.metrics["loss"] = loss.value.detach();
      loss.weight = at::scalar_tensor(is_second ? 0 : 4, at::kDouble);
      return loss;
    };
    return run(job, true);
  };
  const auto outcome = with_second(std::numeric_limits<double>::quiet_NaN());
  for (const auto& tensor : outcome.tensors) CHECK(tensor.isfinite().all().item<bool>());
  CHECK(outcome.results[1][2] == Approx(outcome.metrics[1].at("loss")));
  check_same(outcome, with_second(1));
}

TEST_CASE("a weight that is none drops the window", "[device]") {
  const double weight = GENERATE(-1.0, std::numeric_limits<double>::quiet_NaN());
  const auto with_second = [](double second) {
    Job job;
    job.rows = {8, 8, 8};
    job.step = [second](Net& net, const at::Tensor& x, int step) -> Loss {
      Loss loss(plain_loss(net, x, step).value);
      loss.weight = at::scalar_tensor(step == 1 ? second : 4, at::kDouble);
      return loss;
    };
    return run(job, true);
  };
  const auto outcome = with_second(weight);
  CHECK(std::isnan(outcome.results[1][2]));
  CHECK(outcome.results[1][3] == 0);
  check_same(outcome.tensors, with_second(0).tensors);
}

TEST_CASE("buffers that nobody writes stay as they are on a device", "[device]") {
  struct Constants : torch::nn::Module {
    Constants()
        : last(register_module("last", torch::nn::Linear(7, 1))),
          mask(register_buffer("mask", at::ones({3, 3}, at::kBool).tril())),
          turns(register_buffer("turns", at::polar(at::ones({3}), at::linspace(0, 1, 3)))),
          wide(register_buffer("wide", at::full({1}, 0.1).expand({4}))),
          third(register_buffer("third", at::full({5}, 1.0 / 3))) {}
    at::Tensor forward(const at::Tensor& x) { return last(x); }

    torch::nn::Linear last;
    at::Tensor mask, turns, wide, third;
  };
  MirroredStrategy strategy({"cpu", "cpu"});
  auto model = strategy.prepare([] { return std::make_shared<Constants>(); });
  optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  strategy.prepare(optimizer);
  std::vector<at::Tensor> before;
  for (const auto& buffer : model->buffers()) before.push_back(buffer.clone());
  for (int step = 0; step < 3; ++step) {
    strategy.step([&](const at::Tensor& x) { return model->forward(x).square().mean(); }, batch(9, step));
  }
  check_same(model->buffers(), before);
}

TEST_CASE("a failing replica drops the window on a device, too", "[device]") {
  const auto attempt = [](bool on_device) {
    play_streams_on_cpu(on_device);
    torch::manual_seed(1);
    std::vector<at::Tensor> values;
    {
      MirroredStrategy strategy({"cpu", "cpu"});
      auto model = strategy.prepare([] { return Net(); });
      optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
      strategy.prepare(optimizer);
      for (int step = 0; step < 4; ++step) {
        const auto fn = [&](const at::Tensor& x) {
          if (step == 1 && strategy.replica() == 1) throw std::domain_error("no root of a negative number");
          return plain_loss(*model, x, step).value;
        };
        if (step == 1) {
          CHECK_THROWS_AS(strategy.step(fn, batch(9, step)), std::domain_error);
        } else {
          strategy.step(fn, batch(9, step));
        }
      }
      CHECK(strategy.steps() == 3);
      for (const auto& parameter : model->parameters()) values.push_back(parameter.detach().clone());
    }
    play_streams_on_cpu(true);
    return values;
  };
  check_same(attempt(true), attempt(false));
}

TEST_CASE("windows skipped in a row are an error that names where", "[device]") {
  Job job;
  job.options.max_skipped = 4;
  job.rows.assign(10, 8);
  job.step = [](Net& net, const at::Tensor& x, int step) -> Loss {
    return plain_loss(net, x, step).value * std::numeric_limits<double>::infinity();
  };
  try {
    run(job, true);
    FAIL("nothing was thrown");
  } catch (const NonFinite& error) {
    CHECK_THAT(error.what(), ContainsSubstring("4 windows in a row"));
    CHECK_THAT(error.what(), ContainsSubstring("of replica 0"));
  }
  play_streams_on_cpu(true);
}

TEST_CASE("sparse rows are stepped on a device as on the host", "[device]") {
  const auto train = [](bool on_device) {
    play_streams_on_cpu(on_device);
    torch::manual_seed(1);
    std::vector<at::Tensor> values;
    {
      MirroredStrategy strategy({"cpu", "cpu"}, {.clip_norm = 0.5});
      auto model =
          strategy.prepare([] { return torch::nn::Embedding(torch::nn::EmbeddingOptions(11, 3).sparse(true)); });
      optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(1e-1));
      strategy.prepare(optimizer);
      for (int step = 0; step < 3; ++step) {
        const auto ids = at::linspace(0, 6 + step, 9).to(at::kLong);
        strategy.step([&](const at::Tensor& x) { return model->forward(x).square().mean(); }, ids);
      }
      for (const auto& parameter : model->parameters()) values.push_back(parameter.detach().clone());
    }
    play_streams_on_cpu(true);
    return values;
  };
  check_same(train(true), train(false));
}
