// The C++ twin of test_saving_in_cpp.py's program: goes on from the newest checkpoint, makes some steps, and saves.
// Usage: resuming FOLDER STEPS PRECISION [REPLICAS]; without REPLICAS it is one of several workers. PRECISION "rows": a
// table on a parameter server instead.
#include <ATen/ops/arange.h>
#include <ATen/ops/sin.h>
#include <torch/data/datasets/base.h>
#include <torch/data/example.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "muster/mirrored.h"
#include "muster/multi_worker.h"
#include "muster/optim.h"
#include "muster/parameter_server.h"
#include "muster/sharded_embedding.h"

namespace {

namespace nn = torch::nn;
using Example = torch::data::Example<>;

struct Points : torch::data::datasets::BatchDataset<Points, Example, c10::ArrayRef<size_t>> {
  Example get_batch(c10::ArrayRef<size_t> indices) override {
    std::vector<at::Tensor> inputs;
    std::vector<int64_t> targets;
    for (const size_t i : indices) {
      inputs.push_back(at::sin(at::arange(6, at::kFloat) * static_cast<double>(i + 1)));
      targets.push_back(static_cast<int64_t>(i % 3));
    }
    return {at::stack(inputs), at::tensor(targets)};
  }
  std::optional<size_t> size() const override { return 40; }
};

std::unique_ptr<muster::Strategy> make_strategy(int argc, char** argv) {
  muster::StrategyOptions options;
  const std::string precision = argv[3];
  if (precision == "fp16") options.precision = muster::Precision::fp16;
  if (precision == "bf16") options.precision = muster::Precision::bf16;
  options.threads_per_replica = 1;
  if (argc < 5) {
    return std::make_unique<muster::MultiWorkerMirroredStrategy>(muster::Cluster::from_env(),
                                                                 std::vector<std::string>{}, options);
  }
  const std::vector<std::string> devices(static_cast<size_t>(std::atoi(argv[4])), "cpu");
  return std::make_unique<muster::MirroredStrategy>(devices, options);
}

void train(muster::Strategy& strategy, const std::string& folder, int64_t steps) {
  auto model = strategy.prepare([] {
    return nn::Sequential(nn::Linear(6, 16), nn::BatchNorm1d(16), nn::ReLU(), nn::Dropout(0.2), nn::Linear(16, 3));
  });
  muster::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(64.0));  // the saved one counts
  strategy.prepare(optimizer);
  auto loader = strategy.prepare_loader(Points(), {.batch_size = 8, .shuffle = true});
  const auto state = strategy.load(folder);
  if (!state) throw muster::CheckpointError("there is no checkpoint in " + folder);
  const int64_t end = strategy.steps() + steps;
  while (strategy.steps() < end) {
    for (auto& batch : loader) {
      strategy.step(
          [&](const Example& part) { return nn::functional::cross_entropy(model->forward(part.data), part.target); },
          batch);
      if (strategy.steps() == end) break;
    }
  }
  strategy.save(folder, *state);
  strategy.close();
}

struct Clicks : torch::nn::Module {
  Clicks()
      : table(register_module(
            "table", muster::ShardedEmbedding(60, 4,
                                              muster::ShardedEmbeddingOptions{
                                                  .mode = muster::Reduction::sum, .scale = 0.3, .on_servers = true}))),
        read(register_module("read", nn::Linear(4, 1))) {}
  muster::ShardedEmbedding table;
  nn::Linear read;
};

void train_rows(const std::string& folder, int64_t steps) {
  muster::ParameterServerStrategy strategy(muster::Cluster{}, {}, {.threads_per_replica = 1});
  auto model = strategy.prepare([] { return Clicks(); });
  muster::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(64.0));
  strategy.prepare(optimizer);
  if (!strategy.load(folder)) throw muster::CheckpointError("there is no checkpoint in " + folder);
  const int64_t end = strategy.steps() + steps;
  while (strategy.steps() < end) {
    const auto ids = (at::arange(8) * (3 + strategy.steps())).remainder(20).view({4, 2});
    strategy.step([&](const at::Tensor& x) { return model->read(model->table(x)).square().mean(); }, ids);
  }
  strategy.save(folder);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    if (std::string(argv[3]) == "rows") {
      train_rows(argv[1], std::atoi(argv[2]));
      return 0;
    }
    const auto strategy = make_strategy(argc, argv);
    train(*strategy, argv[1], std::atoi(argv[2]));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
