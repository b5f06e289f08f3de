#include "muster/loss_scaler.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <limits>
#include <thread>

#include "cpp/catch.h"
#include "muster/error.h"

using namespace muster;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

at::Tensor parameter() { return at::ones({3}).requires_grad_(); }

}  // namespace

TEST_CASE("a loop with a loss scaler follows GradScaler", "[precision]") {
  // Scale and tracker that torch.amp.GradScaler(init_scale=8, growth_interval=2) shows after each update.
  const struct {
    bool overflow;
    LossScalerState after;
  } script[] = {{false, {8, 1}}, {false, {16, 0}}, {true, {8, 0}},  {false, {8, 1}}, {true, {4, 0}},
                {true, {2, 0}},  {false, {2, 1}},  {false, {4, 0}}, {false, {4, 1}}};
  const auto weight = parameter();
  torch::optim::SGD optimizer({weight}, 0.5);
  LossScaler scaler({.init = 8, .interval = 2});
  double expected = 1;
  for (const auto& [overflow, after] : script) {
    optimizer.zero_grad();
    scaler.scale((weight * (overflow ? kInfinity : 1.0F)).sum()).backward();
    CHECK(scaler.step(optimizer) == !overflow);
    scaler.update();
    CHECK(scaler.state() == after);
    if (!overflow) expected -= 0.5;
    CHECK(weight.allclose(at::full({3}, expected)));
  }
  LossScaler other;
  other.load_state(scaler.state());
  CHECK(other.state() == scaler.state());
}

TEST_CASE("gradients may be looked at between unscaling and the step", "[precision]") {
  const auto weight = parameter();
  torch::optim::SGD optimizer({weight}, 0.5);
  LossScaler scaler;
  scaler.scale(weight.sum() * 3).backward();
  scaler.unscale(optimizer);
  CHECK(weight.grad().equal(at::full({3}, 3.0F)));
  CHECK_THROWS_AS(scaler.unscale(optimizer), InvalidArgument);
  CHECK(scaler.step(optimizer));
  CHECK_THROWS_AS(scaler.step(optimizer), InvalidArgument);
  scaler.update();
  CHECK_THROWS_AS(scaler.update(), InvalidArgument);
}

TEST_CASE("bad options and states of a loss scaler are refused", "[precision]") {
  CHECK_THROWS_AS(LossScaler({.init = 0}), InvalidArgument);
  CHECK_THROWS_AS(LossScaler({.growth = 1}), InvalidArgument);
  CHECK_THROWS_AS(LossScaler({.backoff = 1}), InvalidArgument);
  CHECK_THROWS_AS(LossScaler({.interval = 0}), InvalidArgument);
  LossScaler scaler;
  CHECK_THROWS_AS(LossScaler({.init = 1e-50}), InvalidArgument);
  CHECK_THROWS_AS(scaler.load_state({-1, 0}), InvalidArgument);
  CHECK_THROWS_AS(scaler.load_state({1e39, 0}), InvalidArgument);
  CHECK_THROWS_AS(scaler.load_state({1, -1}), InvalidArgument);

  const auto weight = at::ones({3}, at::kHalf).requires_grad_();
  weight.mutable_grad() = at::ones({3}, at::kHalf);
  torch::optim::SGD optimizer({weight}, 0.5);
  CHECK_THROWS_AS(scaler.unscale(optimizer), InvalidArgument);
}

TEST_CASE("autocast belongs to its thread and nests", "[precision]") {
  const torch::nn::Linear linear(4, 4);
  const auto dtype = [&] { return linear->weight.matmul(at::ones({4, 4})).scalar_type(); };
  {
    const Autocast outer(Precision::bf16);
    CHECK(dtype() == at::kBFloat16);
    {
      const Autocast inner(Precision::fp16);
      CHECK(dtype() == at::kHalf);
      const Autocast off(Precision::fp32);
      CHECK(dtype() == at::kFloat);
    }
    CHECK(dtype() == at::kBFloat16);
    at::ScalarType elsewhere{};
    std::thread([&] { elsewhere = dtype(); }).join();
    CHECK(elsewhere == at::kFloat);
  }
  CHECK(dtype() == at::kFloat);
  CHECK(!at::autocast::is_autocast_enabled(c10::kCPU));
}

TEST_CASE("a step inside an outer autocast is seen by the next forward", "[precision]") {
  const auto weight = at::ones({2, 2}).requires_grad_();
  torch::optim::SGD optimizer({weight}, 1.0);
  LossScaler scaler;
  const Autocast outer(Precision::bf16);
  const auto forward = [&] { return at::ones({1, 2}).matmul(weight).sum(); };
  CHECK(forward().item<float>() == 4);
  scaler.scale(forward()).backward();
  CHECK(scaler.step(optimizer));
  CHECK(forward().item<float>() == 0);
}
