// A window whose numbers stay on the device is the one that the host counts, bit for bit.
#include <ATen/ops/linspace.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/nn/modules/embedding.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "cpp/catch.h"
#include "cpp/emulated_device/device_job.h"

using namespace muster;
using namespace muster::testing;

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

TEST_CASE("replicas may name metrics in different order, in micro-batches, too", "[device]") {
  Job job;
  job.replicas = 3;
  job.options.accumulate = 3;
  job.step = [](Net& net, const at::Tensor& x, int step) -> Loss {
    Loss loss(plain_loss(net, x, step).value);
    const auto replica = static_cast<int>(x[0][0].item<float>() * 1000) % 3;  // differs between them
    if (replica != 0) loss.metrics["b" + std::to_string(step)] = x.mean();
    if (replica != 1) loss.metrics["a"] = x.sum();
    loss.metrics["c" + std::to_string(step % 2)] = x.square().sum();
    return loss;
  };
  job.rows = {9, 9, 9, 9, 9, 9};
  check_job(job);
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
