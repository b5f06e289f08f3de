// The C++ twin of test_joining.py's worker of a synchronous job: joins, trains to the end, and prints the samples of
// its steps by epoch and what the parameters are afterwards.
#include <ATen/ops/tensor.h>
#include <torch/data/datasets/base.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "muster/optim.h"
#include "muster/parameter_server.h"

namespace {

constexpr size_t kSamples = 50;

// Sample i is (i, i, i, i).
struct Numbers : torch::data::datasets::BatchDataset<Numbers, at::Tensor> {
  at::Tensor get_batch(c10::ArrayRef<size_t> indices) override {
    std::vector<float> values;
    for (const size_t index : indices) values.insert(values.end(), 4, static_cast<float>(index));
    return at::tensor(values).view({-1, 4});
  }
  std::optional<size_t> size() const override { return kSamples; }
};

torch::nn::Linear zeros() {
  torch::nn::Linear module(torch::nn::LinearOptions(4, 1).bias(false));
  const at::NoGradGuard no_grad;
  module->weight.zero_();
  return module;
}

}  // namespace

int main(int argc, char** argv) {
  const int epochs = argc > 1 ? std::atoi(argv[1]) : 1;
  muster::StrategyOptions options;
  options.threads_per_replica = 1;
  muster::ParameterServerStrategy strategy(muster::Cluster::from_env(), {}, options);
  auto model = strategy.prepare([] { return zeros(); });
  // A learning rate that must not count: it is the others'.
  muster::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(64.0));
  strategy.prepare(optimizer);
  auto loader = strategy.prepare_loader(Numbers(), {.batch_size = 4, .shuffle = true});
  while (loader.epoch() < epochs) {
    std::string samples;
    const auto epoch = loader.epoch();
    for (auto& batch : loader) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      strategy.step(
          [&](const at::Tensor& x) {
            muster::Loss loss(model->forward(x).sum());
            loss.reduction = muster::Reduction::sum;
            return loss;
          },
          batch);
      const auto column = batch[0].select(1, 0);
      for (int64_t i = 0; i < column.numel(); ++i) samples += " " + std::to_string(column[i].item<int64_t>());
    }
    std::printf("epoch %d:%s\n", static_cast<int>(epoch), samples.c_str());
  }
  std::printf("left:");
  const auto weights = model->weight.detach().flatten();
  for (int64_t i = 0; i < weights.numel(); ++i) std::printf(" %a", weights[i].item<double>());
  std::printf("\n");
  return 0;
}
