#include "strategy/step_writes.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <atomic>

#include "cpp/catch.h"
#include "cpp/strategy/workers.h"
#include "muster/error.h"
#include "muster/mirrored.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::testing;

namespace {

std::atomic<bool> forward_writes{true};

// A student, and a teacher that forward lets follow it.
struct Teaching : torch::nn::Module {
  Teaching()
      : student(register_module("student", torch::nn::Linear(3, 1))),
        teacher(register_module("teacher", torch::nn::Linear(3, 1))) {
    for (const auto& parameter : teacher->parameters()) parameter.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    if (forward_writes) {
      const at::NoGradGuard no_grad;
      teacher->weight.mul_(0.9).add_(student->weight, 0.1);
    }
    return (student(x) - teacher(x)).square().mean();
  }

  torch::nn::Linear student;
  torch::nn::Linear teacher;
};

}  // namespace

TEST_CASE("a parameter that several replicas of a process write in a step is an error", "[step]") {
  const int replicas = GENERATE(1, 2);
  MirroredStrategy strategy(cpus(replicas));
  forward_writes = true;
  auto model = strategy.prepare([] { return std::make_shared<Teaching>(); });
  torch::optim::SGD sgd(model->student->parameters(), 0.1);
  strategy.prepare(sgd);
  const auto step = [&] { strategy.step([&](const at::Tensor& x) { return model->forward(x); }, at::ones({4, 3})); };
  if (replicas == 1) {
    CHECK_NOTHROW(step());
    return;
  }
  const auto text = message_of<InvalidArgument>(step);
  CHECK(contains(text, "'teacher.weight' was written in the step"));
  CHECK(contains(text, "2 replicas"));
  forward_writes = false;
  const auto before = model->student->weight.detach().clone();
  CHECK_NOTHROW(step());
  CHECK_FALSE(model->student->weight.equal(before));
}

TEST_CASE("an embedding may renormalise its rows in forward, on several replicas", "[step]") {
  MirroredStrategy strategy(cpus(2));
  auto model =
      strategy.prepare(std::make_shared<torch::nn::EmbeddingImpl>(torch::nn::EmbeddingOptions(6, 4).max_norm(0.5)));
  torch::optim::SGD sgd(model->parameters(), 0.1);
  strategy.prepare(sgd);
  const auto ids = at::tensor({0, 1, 2, 3}, at::kLong);
  CHECK_NOTHROW(strategy.step([&](const at::Tensor& x) { return model->forward(x).square().mean(); }, ids));
}

TEST_CASE("writes of replicas with memory of their own are no matter of the step's", "[step]") {
  ParameterRegistry registry({c10::Device(c10::kCPU)});
  const auto workers = comm::make_single();
  const auto w = at::ones({3}).requires_grad_();
  registry.add({{{{"w", w}}}, {{}}}, *workers);
  const StepWrites alone(registry, {c10::Device(c10::kCPU)});
  const StepWrites shared(registry, {c10::Device(c10::kCPU), c10::Device(c10::kCPU)});
  CHECK_NOTHROW(shared.check());
  {
    const at::NoGradGuard no_grad;
    w.add_(1);
  }
  CHECK_NOTHROW(alone.check());
  CHECK_THROWS_AS(shared.check(), InvalidArgument);
  registry.expect_writes(0);
  CHECK_NOTHROW(shared.check());
}
