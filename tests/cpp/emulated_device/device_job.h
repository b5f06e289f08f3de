// A job of replicas that work as on streams, and the same on the host: both leave the same bits.
#pragma once

#include <ATen/ops/linspace.h>
#include <ATen/ops/tanh.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <array>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cpp/catch.h"
#include "device/device.h"
#include "muster/mirrored.h"
#include "muster/optim.h"
#include "muster/per_replica.h"

namespace muster::testing {

/// Sizes that are no multiple of anything; the batch norm has buffers.
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

inline at::Tensor batch(int64_t rows, int step) {
  return at::linspace(-1, 1 + step, rows * 7, at::kFloat).sin().view({rows, 7});
}

/// In equal parts, larger first; one that is too small for that goes to the first replica whole.
inline PerReplica<at::Tensor> parts_of(const at::Tensor& whole, int replicas) {
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

inline Loss plain_loss(Net& net, const at::Tensor& x, int) { return net.forward(x).square().mean(); }

template <class O, class Options>
MakeOptimizer optimizer(const Options& options) {
  return [options](const std::vector<at::Tensor>& parameters) { return std::make_unique<O>(parameters, options); };
}

inline MakeOptimizer adamw() { return optimizer<optim::AdamW>(torch::optim::AdamWOptions(1e-2).weight_decay(0.1)); }

/// What a run leaves, in numbers.
struct Outcome {
  std::vector<at::Tensor> tensors;    // parameters, buffers
  std::vector<at::Tensor> gradients;  // of the last step, undefined ones left out
  std::vector<std::vector<double>> results;
  std::vector<std::map<std::string, double>> metrics;
};

struct Job {
  int replicas = 2;
  bool apart = false;  // each replica has a device of its own
  StrategyOptions options{};
  MakeOptimizer make_optimizer = adamw();
  StepFunction step = plain_loss;
  std::vector<int64_t> rows = {9, 9, 6, 9, 2, 9};  // 2: of two or more replicas, one has a part
};

inline Outcome run(const Job& job, bool on_device) {
  play_streams_on_cpu(on_device, job.apart);
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

inline constexpr size_t kGradNorm = 4;  // in Outcome::results

inline bool same(double a, double b, double tolerance = 0) {
  return a == b || (std::isnan(a) && std::isnan(b)) || std::abs(a - b) <= tolerance * std::abs(b);
}

inline void check_same(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  REQUIRE(actual.size() == expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    INFO("tensor " << i);
    CHECK(actual[i].equal(expected[i]));
  }
}

/// Three replicas, each on a device of its own, which must read the same parameters in each step.
class WatchedJob {
 public:
  WatchedJob() { strategy.prepare(optimizer); }

  void step(int number) {
    strategy.step(
        [&](const at::Tensor& x) {
          auto& parameters = seen.at(static_cast<size_t>(strategy.replica()));
          parameters.clear();
          for (const auto& parameter : model->parameters()) parameters.push_back(parameter.detach().clone());
          in_step(strategy.replica(), *model);
          return plain_loss(*model, x, number);
        },
        parts_of(batch(9, number), 3));
    for (size_t r = 1; r < seen.size(); ++r) check_same(seen.at(r), seen.at(0));
  }

  MirroredStrategy strategy{{"cpu", "cpu", "cpu"}, StrategyOptions()};
  Replicated<Net> model = strategy.prepare([] { return Net(); });
  optim::AdamW optimizer{model->parameters(), torch::optim::AdamWOptions(1e-2)};
  std::array<std::vector<at::Tensor>, 3> seen;  // by replica: what its last pass read
  std::function<void(int replica, Net& net)> in_step = [](int, Net&) {};
};

inline void check_same(const Outcome& actual, const Outcome& expected, double norm_tolerance = 0) {
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

inline void check_job(const Job& job, double norm_tolerance = 0) {
  check_same(run(job, true), run(job, false), norm_tolerance);
}

/// The host takes this norm of the means, the device of the sums.
inline constexpr double kNormOfSums = 1e-6;

}  // namespace muster::testing
