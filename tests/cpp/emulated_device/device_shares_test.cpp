// Devices of one process that divide the steps of flat optimizers: each steps its shard and stores it to all.
#include <ATen/ops/embedding.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones_like.h>
#include <torch/nn/modules/embedding.h>

#include <functional>

#include "cpp/catch.h"
#include "cpp/emulated_device/device_job.h"
#include "cpp/emulated_device/played_link.h"
#include "device/peer_access.h"

using namespace muster;
using namespace muster::testing;

namespace {

constexpr int64_t kInputs = 70;

/// Parameters that shards cut, and small ones; rows of a sparse gradient; one without a gradient, one frozen.
struct WideNet : torch::nn::Module {
  WideNet()
      : first(register_module("first", torch::nn::Linear(kInputs, 200))),
        table(register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(2000, 5).sparse(true)))),
        last(register_module("last", torch::nn::Linear(200, 5))),
        unused(register_module("unused", torch::nn::Linear(2, 2))) {
    last->bias.requires_grad_(false);
  }

  at::Tensor forward(const at::Tensor& x, int step) {
    auto y = last(at::tanh(first(x.to(first->weight.scalar_type()))));
    if (has_rows) y = y + table(at::full({x.size(0)}, 3 + 7 * step, at::kLong));
    return y.to(at::kFloat);
  }

  torch::nn::Linear first;
  torch::nn::Embedding table;
  torch::nn::Linear last;
  torch::nn::Linear unused;
  bool has_rows = true;
};

using Between = std::function<void(WideNet& net, torch::optim::Optimizer& optimizer, int step)>;
using InForward = std::function<void(WideNet& net, int replica, int step)>;

struct Play {
  int replicas = 3;
  bool has_peer_access = true;
  bool has_rows = true;
  at::ScalarType dtype = at::kFloat;
  StrategyOptions options{};
  MakeOptimizer make_optimizer = adamw();
  Between before = [](WideNet&, torch::optim::Optimizer&, int) {};  ///< each step
  InForward in_forward = [](WideNet&, int, int) {};
  int steps = 6;
};

// What each step tells, then parameters and the optimizer's state after them.
std::vector<at::Tensor> play(const Play& played, bool on_device) {
  play_streams_on_cpu(on_device, on_device);
  play_peer_access(played.has_peer_access);
  std::vector<at::Tensor> seen;
  {
    torch::manual_seed(1);
    MirroredStrategy strategy(std::vector<std::string>(static_cast<size_t>(played.replicas), "cpu"), played.options);
    auto model = strategy.prepare([&] {
      WideNet net;
      net.has_rows = played.has_rows;
      net.to(played.dtype);
      return net;
    });
    const auto optimizer = played.make_optimizer(model->parameters());
    strategy.prepare(*optimizer);
    for (int s = 0; s < played.steps; ++s) {
      played.before(*model, *optimizer, s);
      const auto whole = at::linspace(-1, 1 + s, 7 * kInputs, at::kFloat).sin().view({7, kInputs});
      const auto result = strategy.step(
          [&](const at::Tensor& x) {
            played.in_forward(*model, strategy.replica(), s);
            return model->forward(x, s).square().mean();
          },
          parts_of(whole, played.replicas));
      seen.push_back(result.loss.clone());
      if (result.grad_norm.defined()) seen.push_back(result.grad_norm.clone());
    }
    for (const auto& parameter : model->parameters()) seen.push_back(parameter.detach().clone());
    for (const auto& parameter : model->parameters()) {
      const auto found = optimizer->state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer->state().end()) continue;
      if (const auto* state = dynamic_cast<const torch::optim::AdamWParamState*>(found->second.get())) {
        seen.push_back(state->exp_avg().clone());
        seen.push_back(state->exp_avg_sq().clone());
      }
    }
  }
  play_streams_on_cpu(true);
  play_peer_access(true);
  return seen;
}

void check_against_host(const Play& played) {
  const auto actual = play(played, true);
  const auto expected = play(played, false);
  REQUIRE(actual.size() == expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    INFO("tensor " << i);
    // The norm alone is of sums here and of means there.
    const bool is_norm = actual[i].dim() == 0;
    CHECK((actual[i].equal(expected[i]) || (is_norm && at::allclose(actual[i], expected[i], kNormOfSums))));
  }
}

}  // namespace

TEST_CASE("devices that divide steps leave the bits of replicas on the host", "[device]") {
  PlayedLink link(Link::nccl);
  Play played;
  played.replicas = GENERATE(2, 3, 5);
  SECTION("plainly") {}
  SECTION("without peer access, the first one steps") { played.has_peer_access = false; }
  SECTION("of parameters without rows") { played.has_rows = false; }
  SECTION("clipped, over several micro-batches") {
    played.options.accumulate = 2;
    played.options.clip_norm = 0.3;
  }
  SECTION("by another norm") {
    played.options.clip_norm = 0.3;
    played.options.clip_norm_type = GENERATE(1.0, double{INFINITY});
  }
  SECTION("of fp64") { played.dtype = at::kDouble; }
  SECTION("of bf16, whose master copies are divided, too") { played.dtype = at::kBFloat16; }
  SECTION("whose means are kept, so that the first one steps") { played.options.keep_gradients = true; }
  SECTION("with momentum, which moves all rows") {
    played.make_optimizer = optimizer<optim::SGD>(torch::optim::SGDOptions(1e-2).momentum(0.9));
  }
  SECTION("of Adagrad") { played.make_optimizer = optimizer<optim::Adagrad>(torch::optim::AdagradOptions(1e-2)); }
  SECTION("of Adam with maxima, from the third step on") {
    played.make_optimizer = optimizer<optim::Adam>(torch::optim::AdamOptions(1e-2));
    played.before = [](WideNet&, torch::optim::Optimizer& adam, int step) {
      if (step < 2) return;
      for (auto& group : adam.param_groups()) static_cast<torch::optim::AdamOptions&>(group.options()).amsgrad(true);
    };
  }
  check_against_host(played);
}

TEST_CASE("devices that divide steps leave what the first one does where it steps alone", "[device]") {
  PlayedLink link(Link::nccl);
  Play played;
  played.options.accumulate = GENERATE(1, 2);
  SECTION("of sums that travelled as bf16") { played.options.wire = Wire::bf16; }
  SECTION("of parameters that forward passes write, each replica its own copy") {
    played.in_forward = [](WideNet& net, int replica, int step) {
      const at::NoGradGuard no_grad;
      if (step == 2) net.first->weight.data().fill_(0.01 * (replica + 1));
      if (step == 3 && replica == 1) net.first->bias.mul_(2);
      if (step == 4 && replica == 0) net.first->bias.data().mul_(2);
    };
  }
  SECTION("of parameters that are written within a window") {
    played.before = [](WideNet& net, torch::optim::Optimizer&, int step) {
      if (step == 3) net.first->weight.data().mul_(2);
      if (step == 5) net.first->weight.data().narrow(0, 100, 50).fill_(1);
    };
  }
  SECTION("of one that gets gaps within a window") {
    played.before = [](WideNet& net, torch::optim::Optimizer&, int step) {
      const auto& weight = net.first->weight;
      const auto values = weight.detach().clone();
      if (step == 3) weight.set_data(at::full({200, 2 * kInputs}, 1.F).narrow(1, 3, kInputs).copy_(values));
    };
  }
  const auto divided = play(played, true);
  played.has_peer_access = false;
  check_same(divided, play(played, true));
}

TEST_CASE("programs that edit parameters and state between divided steps get what they ask for", "[device]") {
  PlayedLink link(Link::nccl);
  Play played;
  SECTION("parameters, in ways that torch counts and does not") {
    played.before = [](WideNet& net, torch::optim::Optimizer&, int step) {
      const at::NoGradGuard no_grad;
      if (step == 2) net.first->weight.mul_(0.5);
      if (step == 3) net.first->weight.data().neg_();
      if (step == 4) net.last->bias.data().fill_(3);
      if (step == 5) net.first->bias.set_data(at::full_like(net.first->bias, 0.25));
    };
  }
  SECTION("state that is replaced") {
    played.before = [](WideNet& net, torch::optim::Optimizer& adam, int step) {
      if (step != 3) return;
      auto& state = *adam.state().at(net.first->weight.unsafeGetTensorImpl());
      static_cast<torch::optim::AdamWParamState&>(state).exp_avg(at::full_like(net.first->weight, 0.01));
    };
  }
  SECTION("state that is written in place") {
    played.before = [](WideNet& net, torch::optim::Optimizer& adam, int step) {
      if (step != 3) return;
      auto& state = *adam.state().at(net.first->weight.unsafeGetTensorImpl());
      static_cast<torch::optim::AdamWParamState&>(state).exp_avg_sq().mul_(4);
    };
  }
  SECTION("state that is erased") {
    played.before = [](WideNet& net, torch::optim::Optimizer& adam, int step) {
      if (step == 3) adam.state().erase(net.first->weight.unsafeGetTensorImpl());
    };
  }
  SECTION("a step by hand") {
    played.before = [](WideNet& net, torch::optim::Optimizer& adam, int step) {
      if (step != 3) return;
      net.first->weight.mutable_grad() = at::ones_like(net.first->weight);
      adam.step();
      net.first->weight.mutable_grad() = at::Tensor();
    };
  }
  SECTION("a parameter that is frozen, and trained again") {
    played.before = [](WideNet& net, torch::optim::Optimizer&, int step) {
      if (step == 2 || step == 4) net.first->weight.requires_grad_(step == 4);
    };
  }
  SECTION("a parameter whose memory gets gaps, which the first device steps, and loses them") {
    played.before = [](WideNet& net, torch::optim::Optimizer&, int step) {
      const auto& weight = net.first->weight;
      const auto values = weight.detach().clone();
      if (step == 2) weight.set_data(at::full({200, 2 * kInputs}, 1.F).narrow(1, 3, kInputs).copy_(values));
      if (step == 4) weight.set_data(values.contiguous());
    };
  }
  check_against_host(played);
}

TEST_CASE("what devices divide and store to one another is not broadcast", "[device]") {
  const Apart apart(true);
  PlayedLink link(Link::nccl);
  WatchedJob job;
  job.step(0);
  job.step(1);
  const int before = link.broadcasts();
  const at::Tensor bias = job.model->last->bias;
  job.model->unused->bias.requires_grad_(false);
  job.model->unused->bias.data().fill_(3);
  bias.data().fill_(5);
  job.step(2);
  CHECK(job.seen[2].back().equal(at::full({2}, 3.F)));
  CHECK(job.seen[2].at(5).equal(at::full({5}, 5.F)));
  // A replica that writes its own copy goes on with what the first one has.
  job.in_step = [](int replica, Net& net) {
    const at::NoGradGuard no_grad;
    if (replica == 1) net.unused->weight.data().fill_(7);
    if (replica == 2) net.unused->weight.mul_(2);
  };
  job.step(3);
  job.in_step = [](int, Net&) {};
  job.step(4);
  CHECK(link.broadcasts() == before);
  {
    const at::NoGradGuard no_grad;
    bias.fill_(6);  // torch counts it: what was written goes to all, without a look
  }
  job.step(5);
  CHECK(link.broadcasts() == before + 1);
  job.step(6);
  CHECK(link.broadcasts() == before + 1);
}
