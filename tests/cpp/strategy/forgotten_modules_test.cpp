// Warnings of modules that were not prepared, or whose optimizer was not.
#include <ATen/ops/ones.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include "core/log.h"
#include "cpp/catch.h"
#include "muster/mirrored.h"
#include "muster/optim.h"
#include "muster/strategy.h"

using namespace muster;
namespace nn = torch::nn;
using Catch::Matchers::Contains;

namespace {

// The warnings while it lives.
struct Heard {
  Heard() {
    set_log_sink([this](LogLevel level, const std::string& text) {
      if (level != LogLevel::warning) return;
      const std::lock_guard lock(mutex);
      texts.push_back(text);
    });
  }
  ~Heard() { set_log_sink({}); }
  Heard(const Heard&) = delete;
  Heard& operator=(const Heard&) = delete;

  std::mutex mutex;
  std::vector<std::string> texts;
};

constexpr const char* kUnstepped = "no prepared optimizer has parameters of torch::nn::LinearImpl, which the loss";

}  // namespace

TEST_CASE("a module that was not prepared is told of, where gradients are averaged", "[strategy]") {
  const Heard heard;
  const int num_replicas = GENERATE(1, 2);
  MirroredStrategy strategy(std::vector<std::string>(static_cast<size_t>(num_replicas), "cpu"));
  auto model = strategy.prepare([] { return nn::Linear(2, 2); });
  optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  strategy.prepare(optimizer);
  nn::Linear forgotten(2, 1);
  for (int i = 0; i < 3; ++i) {
    strategy.step([&](const at::Tensor& x) { return forgotten->forward(model->forward(x)).sum(); }, at::ones({4, 2}));
  }
  if (num_replicas == 1) {
    CHECK(heard.texts.empty());
  } else {
    REQUIRE(heard.texts.size() == 1);
    CHECK_THAT(heard.texts[0], Contains("of shapes") && Contains("[1, 2]") && Contains("parameters in no prepared"));
  }
}

TEST_CASE("inputs that require gradients are no parameters", "[strategy]") {
  const Heard heard;
  MirroredStrategy strategy(std::vector<std::string>{"cpu", "cpu"});
  auto model = strategy.prepare([] { return nn::Linear(2, 2); });
  optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  strategy.prepare(optimizer);
  const auto loss = [&](const at::Tensor& x) { return model->forward(x.clone().detach().requires_grad_()).sum(); };
  for (int i = 0; i < 3; ++i) strategy.step(loss, at::ones({4, 2}));
  CHECK(heard.texts.empty());
}

TEST_CASE("a prepared module that no optimizer steps is told of", "[strategy]") {
  const Heard heard;
  MirroredStrategy strategy;
  auto model = strategy.prepare([] { return nn::Linear(2, 2); });
  auto head = strategy.prepare([] { return nn::Linear(2, 1); });
  optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  strategy.prepare(optimizer);
  const auto loss = [&](const at::Tensor& x) { return head->forward(model->forward(x)).sum(); };
  SECTION("once") {
    for (int i = 0; i < 3; ++i) strategy.step(loss, at::ones({4, 2}));
    REQUIRE(heard.texts.size() == 1);
    CHECK_THAT(heard.texts[0], Contains(kUnstepped));
  }
  SECTION("but not where another one steps it in calls of its own") {
    torch::optim::SGD other(head->parameters(), 0.1);
    strategy.prepare(other);
    strategy.step(loss, at::ones({4, 2}), {.optimizers = {optimizer}});
    CHECK(heard.texts.empty());
  }
  SECTION("nor where its parameters came to an optimizer later") {
    optimizer.add_param_group(torch::optim::OptimizerParamGroup(head->parameters()));
    strategy.step(loss, at::ones({4, 2}));
    CHECK(heard.texts.empty());
  }
  SECTION("nor where they are frozen") {
    for (auto& parameter : head->parameters()) parameter.requires_grad_(false);
    strategy.step(loss, at::ones({4, 2}));
    CHECK(heard.texts.empty());
  }
}
