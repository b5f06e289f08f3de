// Collectives inside a step beside the buckets of gradients, where both go over one group of the devices.
#include <ATen/TensorOperators.h>
#include <ATen/ops/tanh.h>
#include <torch/nn/modules/linear.h>

#include "cpp/catch.h"
#include "cpp/emulated_device/device_job.h"
#include "cpp/emulated_device/played_link.h"
#include "support/eventually.h"

using namespace muster;
using namespace muster::testing;

namespace {

constexpr int kReplicas = 2;
constexpr int64_t kWidth = 24;

struct Deep : torch::nn::Module {
  Deep() {
    for (int i = 0; i < 4; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(i == 0 ? 7 : kWidth, kWidth)));
    }
  }
  std::vector<torch::nn::Linear> layers;
};

struct Run {
  std::vector<at::Tensor> parameters;
  std::vector<double> losses;
  std::vector<bool> overlaps;  ///< by step: whether sums left before backward of replica 0 came to the first layer
};

/// `way`: where the collectives are. A step of few rows has one replica without any. From step `watched` on it is
/// looked whether reductions overlap with backward.
Run train(bool on_device, const std::string& way, int accumulate, const std::vector<int64_t>& rows,
          size_t watched = 100) {
  const Apart apart(on_device);
  if (!on_device) play_streams_on_cpu(false);
  PlayedLink link(on_device ? Link::nccl : Link::none);
  Run run;
  {
    torch::manual_seed(1);
    StrategyOptions options{.accumulate = accumulate};
    options.bucket_bytes = kWidth * kWidth * 4;  // a layer
    MirroredStrategy strategy(std::vector<std::string>(kReplicas, "cpu"), options);
    auto model = strategy.prepare([] { return Deep(); });
    optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
    strategy.prepare(optimizer);
    for (size_t s = 0; s < rows.size(); ++s) {
      const int before = link.reductions_to_one();
      const auto result = strategy.step(
          [&](const at::Tensor& given) {
            at::Tensor x = given;
            for (size_t i = 0; i < model->layers.size(); ++i) {
              x = model->layers[i](x);
              if (i == 0 && s >= watched && strategy.replica() == 0) {
                x.register_hook([&](const at::Tensor&) {
                  run.overlaps.push_back(eventually([&] { return link.reductions_to_one() > before; }));
                });
              }
              if (way == "layers") x = at::tanh(x - strategy.reduce(x.mean(0), ReduceOp::mean));
            }
            if (way == "loss") return strategy.gather(x).square().mean() * 0.5 + x.square().mean();
            if (way == "metric") strategy.reduce(x.detach().mean(), ReduceOp::max);
            return x.square().mean();
          },
          parts_of(batch(rows[s], static_cast<int>(s)), kReplicas));
      run.losses.push_back(result.loss.item<double>());
    }
    for (const auto& parameter : model->parameters()) run.parameters.push_back(parameter.detach().clone());
  }
  play_streams_on_cpu(true);
  return run;
}

}  // namespace

TEST_CASE("collectives inside a step leave the bits of replicas on the host", "[device]") {
  const std::string way = GENERATE("layers", "loss", "metric");
  const int accumulate = GENERATE(1, 2);
  const std::vector<int64_t> rows = {9, 9, 9, 9, 9, 9, 2, 2, 9, 9, 6, 6, 9, 9};
  const auto played = train(true, way, accumulate, rows);
  const auto expected = train(false, way, accumulate, rows);
  INFO(way << ", " << accumulate);
  check_same(played.parameters, expected.parameters);
  CHECK(played.losses == expected.losses);
}

TEST_CASE("buckets leave while backward runs beside collectives inside a step", "[device]") {
  const std::string way = GENERATE("layers", "loss", "metric");
  INFO(way);
  // The first step learns the order of gradients, two more those of the collectives.
  CHECK(train(true, way, 1, std::vector<int64_t>(7, 9), /*watched=*/5).overlaps == std::vector<bool>{true, true});
}
