// Collectives inside a step can be differentiated twice, and what is lazy keeps its values there.
#include <ATen/ops/cat.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <functional>

#include "cpp/catch.h"
#include "muster/mirrored.h"

using namespace muster;

namespace {

struct Cube : torch::nn::Module {
  Cube() : linear(register_module("linear", torch::nn::Linear(3, 2))) {
    to(at::kDouble);
    const at::NoGradGuard no_grad;
    linear->weight.copy_(at::linspace(-1, 1, 6, at::kDouble).view({2, 3}));
    linear->bias.copy_(at::linspace(0.5, 1, 2, at::kDouble));
  }
  at::Tensor forward(const at::Tensor& x) { return linear(x).pow(3); }

  torch::nn::Linear linear;
};

struct Phase : torch::nn::Module {
  Phase()
      : re(register_parameter("re", at::tensor(0.7, at::kDouble))),
        im(register_parameter("im", at::tensor(0.2, at::kDouble))) {}
  at::Tensor forward(const at::Tensor& x) { return at::real(x * at::complex(re, im).conj()); }

  at::Tensor re;
  at::Tensor im;
};

at::Tensor double_samples() { return at::linspace(-1, 1, 21, at::kDouble).pow(2).view({7, 3}); }

// A function of all samples, of one part of the rows `y`.
using OfAll = std::function<at::Tensor(const at::Tensor& y)>;

at::Tensor squared_gradient(Cube& model, const at::Tensor& given, const OfAll& value) {
  const auto x = given.clone().set_requires_grad(true);
  return torch::autograd::grad({value(model.forward(x))}, {x}, {}, true, true).front().square().sum();
}

void check_penalty(const OfAll& alone, const std::function<OfAll(MirroredStrategy&)>& reduced_by) {
  Cube expected;
  squared_gradient(expected, double_samples(), alone).backward();
  StrategyOptions options;
  options.fuse = false;
  options.timeout = 20;
  MirroredStrategy strategy({"cpu", "cpu", "cpu"}, options);
  auto model = strategy.prepare([] { return Cube(); });
  const auto value = reduced_by(strategy);
  strategy.step(
      [&](const at::Tensor& x) {
        Loss loss(squared_gradient(*model, x, value));
        loss.reduction = Reduction::sum;
        return loss;
      },
      double_samples());
  for (size_t p = 0; p < expected.parameters().size(); ++p) {
    const auto gradient = expected.parameters()[p].grad();
    const auto difference = (gradient - model->parameters()[p].grad()).abs().max();
    CHECK(difference.item<double>() <= 1e-13 * gradient.abs().max().item<double>());
  }
}

}  // namespace

TEST_CASE("reductions in a step are differentiated twice", "[strategy]") {
  check_penalty([](const at::Tensor& y) { return y.sum(0).pow(3).sum(); },
                [](MirroredStrategy& strategy) {
                  return [&](const at::Tensor& y) {
                    const auto sums = strategy.reduce(y.sum(0), ReduceOp::sum);
                    return sums.pow(3).sum() * (static_cast<double>(y.size(0)) / 7);
                  };
                });
  check_penalty([](const at::Tensor& y) { return y.amax(0).pow(2).sum(); },
                [](MirroredStrategy& strategy) {
                  return [&](const at::Tensor& y) {
                    const auto largest = strategy.reduce(y.amax(0), ReduceOp::max);
                    return largest.pow(2).sum() * (static_cast<double>(y.size(0)) / 7);
                  };
                });
}

TEST_CASE("gather and broadcast in a step are differentiated twice", "[strategy]") {
  check_penalty([](const at::Tensor& y) { return y.matmul(y.t()).pow(2).sum(); },
                [](MirroredStrategy& strategy) {
                  return [&](const at::Tensor& y) { return y.matmul(strategy.gather(y).t()).pow(2).sum(); };
                });
  check_penalty([](const at::Tensor& y) { return (y * y[0]).pow(2).sum(); },
                [](MirroredStrategy& strategy) {
                  return [&](const at::Tensor& y) { return (y * strategy.broadcast(y[0] * 1.0, 0)).pow(2).sum(); };
                });
}

TEST_CASE("backward of a step's collective in another call is refused at once", "[strategy]") {
  std::vector<at::Tensor> kept(2);
  auto strategy = std::make_unique<MirroredStrategy>(std::vector<std::string>{"cpu", "cpu"});
  auto model = strategy->prepare([] { return Cube(); });
  strategy->step(
      [&](const at::Tensor& x) {
        const auto y = model->forward(x).mean();
        kept[static_cast<size_t>(strategy->replica())] = strategy->reduce(y, ReduceOp::sum);
        return y;
      },
      double_samples());
  CHECK_THROWS_AS(kept[0].backward(), InvalidArgument);
  strategy->close();
  strategy.reset();
  CHECK_THROWS_AS(kept[1].backward(), InvalidArgument);
}

TEST_CASE("a gradient that is a lazy negation has its sign", "[strategy]") {
  const auto z = at::complex(at::linspace(-1, 2, 6, at::kDouble), at::linspace(3, -1, 6, at::kDouble));
  Phase expected;
  expected.forward(z).square().mean().backward();
  REQUIRE(expected.im.grad().is_neg());
  MirroredStrategy strategy({"cpu"});
  auto model = strategy.prepare([] { return Phase(); });
  strategy.step([&](const at::Tensor& x) { return model->forward(x).square().mean(); }, z);
  CHECK(model->re.grad().item<double>() == Approx(expected.re.grad().item<double>()));
  CHECK(model->im.grad().item<double>() == Approx(expected.im.grad().item<double>()));
}

TEST_CASE("gather keeps conjugates and negations", "[strategy]") {
  const auto z = at::complex(at::ones({1}, at::kDouble), at::ones({1}, at::kDouble) * 2);
  MirroredStrategy strategy({"cpu", "cpu"});
  const auto gathered =
      strategy.run([&](const at::Tensor&) { return strategy.gather(at::imag(z.conj())); }, at::ones({2, 1}));
  CHECK(gathered[0].equal(at::ones({2}, at::kDouble) * -2));
}
