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

enum class Writes { none, counted, through_data };
std::atomic<Writes> forward_writes{Writes::counted};

// A student, and a teacher that forward lets follow it.
struct Teaching : torch::nn::Module {
  Teaching()
      : student(register_module("student", torch::nn::Linear(3, 1))),
        teacher(register_module("teacher", torch::nn::Linear(3, 1))) {
    for (const auto& parameter : teacher->parameters()) parameter.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::NoGradGuard no_grad;
    if (forward_writes == Writes::counted) teacher->weight.mul_(0.9).add_(student->weight, 0.1);
    // As `.data` of Python, which the version counter does not see.
    if (forward_writes == Writes::through_data) teacher->weight.variable_data().mul_(0.9).add_(student->weight, 0.1);
    const at::AutoGradMode with_grad(true);
    return (student(x) - teacher(x)).square().mean();
  }

  torch::nn::Linear student;
  torch::nn::Linear teacher;
};

}  // namespace

TEST_CASE("a parameter that several replicas of a process write in a step is an error", "[step]") {
  const int replicas = GENERATE(1, 2);
  MirroredStrategy strategy(cpus(replicas));
  forward_writes = GENERATE(Writes::counted, Writes::through_data);
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
  const auto run = [&] { strategy.run([&](const at::Tensor& x) { return model->forward(x); }, at::ones({4, 3})); };
  CHECK(contains(message_of<InvalidArgument>(run), "'teacher.weight' was written in run()"));
  forward_writes = Writes::none;
  const auto before = model->student->weight.detach().clone();
  CHECK_NOTHROW(run());
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
  const std::vector<c10::Device> one{c10::Device(c10::kCPU)};
  const std::vector<c10::Device> two(2, c10::Device(c10::kCPU));
  const StepWrites alone(registry, one, /*are_compared=*/false);
  const StepWrites of_worker(registry, one, /*are_compared=*/true);
  const StepWrites shared(registry, two, /*are_compared=*/false);
  CHECK_NOTHROW(shared.check("the step", /*may_stay=*/false));
  CHECK(of_worker.written().empty());
  {
    const at::NoGradGuard no_grad;
    w.add_(1);
  }
  CHECK_NOTHROW(alone.check("the step", /*may_stay=*/false));
  CHECK(alone.written().empty());
  CHECK(of_worker.written() == std::vector<size_t>{0});
  CHECK_THROWS_AS(shared.check("the step", /*may_stay=*/false), InvalidArgument);
  const StepWrites later(registry, two, /*are_compared=*/true);
  registry.parameter(0, 0).set_data(at::zeros({3}));
  CHECK_NOTHROW(later.check("the step", /*may_stay=*/false));  // its replica's own memory
  registry.expect_writes(0);
  CHECK_NOTHROW(shared.check("the step", /*may_stay=*/false));
}
