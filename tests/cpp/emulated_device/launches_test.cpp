// What a window gives its devices to do beside its passes.
#include <ATen/ops/ones.h>
#include <ATen/record_function.h>
#include <torch/nn/modules/container/sequential.h>

#include <atomic>

#include "cpp/catch.h"
#include "cpp/emulated_device/device_job.h"
#include "cpp/emulated_device/played_link.h"
#include "support/cuda_emulation.h"
#include "support/operators.h"

using namespace muster;
using namespace muster::testing;

namespace {

torch::nn::Sequential model_of(bool has_batch_norm) {
  torch::nn::Sequential model;
  for (int layer = 0; layer < 6; ++layer) {
    model->push_back(torch::nn::Linear(24, 24));
    if (has_batch_norm) model->push_back(torch::nn::BatchNorm1d(24));
  }
  return model;
}

// Views and memory, which launch nothing.
const std::set<std::string> kLaunchNothing = {"aten::slice", "aten::t",          "aten::alias", "aten::as_strided",
                                              "aten::empty", "aten::empty_like", "detach"};

struct Window {
  int launches = 0;  ///< of all devices, less those of the passes
  int buckets = 0;
};

constexpr int kRows = 8;

at::Tensor batch_of() { return at::linspace(-1, 1, kRows * 24, at::kFloat).view({kRows, 24}); }

/// The operators of one replica's passes over one micro-batch.
int operators_of_passes(torch::nn::Sequential& model, const at::Tensor& x) {
  for (const auto& parameter : model->parameters()) parameter.mutable_grad() = at::Tensor();
  const auto seed = at::ones({});
  const AllOperators operators;
  model->forward(x).square().mean().backward(seed);
  return operators.without_views(kLaunchNothing);
}

Window window_of(bool has_batch_norm, int replicas, int k, Link link, Wire wire = Wire::exact) {
  PlayedLink played(link);
  const Apart apart(link == Link::nccl);
  Window window;
  StrategyOptions options{.accumulate = k};
  options.wire = wire;
  options.bucket_bytes = 24 * 24 * 4;
  MirroredStrategy strategy(std::vector<std::string>(static_cast<size_t>(replicas), "cpu"), options);
  auto model = strategy.prepare([&] { return model_of(has_batch_norm); });
  optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  strategy.prepare(optimizer);
  std::vector<at::Tensor> parts;
  for (int r = 0; r < replicas; ++r) parts.push_back(batch_of());
  const PerReplica<at::Tensor> batch(std::move(parts));
  const auto step = [&] {
    for (int i = 0; i < k; ++i) {
      strategy.step([&](const at::Tensor& x) { return model->forward(x).square().mean(); }, batch);
    }
  };
  for (int i = 0; i < 3; ++i) step();
  const int collectives = played.collectives();
  int launches = -played.launches() - kernels::cuda::emulation::all_launches;
  std::map<std::string, int> names;
  {
    const AllOperators operators;
    step();
    launches += operators.without_views(kLaunchNothing) - replicas;  // each makes zeros on the host
    names = operators.by_name();
  }
  for (const auto& [name, number] : names) UNSCOPED_INFO(name << " " << number);
  launches += played.launches() + kernels::cuda::emulation::all_launches;
  auto alone = model_of(has_batch_norm);
  window.launches = launches - replicas * k * operators_of_passes(alone, batch_of());
  window.buckets = played.collectives() - collectives - 1;  // but for the numbers'
  return window;
}

}  // namespace

TEST_CASE("a window launches a bounded number of kernels, with batch norm too", "[device]") {
  const bool has_batch_norm = GENERATE(false, true);
  const int k = GENERATE(1, 4);
  CAPTURE(has_batch_norm, k);
  // Over NCCL, each of two devices; three more compare the copies of parameters before a divided step.
  const auto two = window_of(has_batch_norm, 2, k, Link::nccl);
  CAPTURE(two.launches, two.buckets);
  REQUIRE(two.buckets > 3);
  CHECK(two.launches <= 2 * ((k + 2) * two.buckets + 5) + 3);
  const auto shared = window_of(has_batch_norm, 2, k, Link::shared_device);
  CAPTURE(shared.launches, shared.buckets);
  // Each replica packs and notes its own, and gathers and scatters its own buffers.
  CHECK(shared.launches <= (2 * k + 1) * shared.buckets + 5 * k + 3 + (has_batch_norm ? 4 : 0));
  const auto one = window_of(has_batch_norm, 1, k, Link::none);
  CAPTURE(one.launches);
  CHECK(one.launches <= (k + 2) * two.buckets + 5);
}

TEST_CASE("what travels as bf16 is rounded where it is packed, in a window of one micro-batch", "[device]") {
  const int k = GENERATE(1, 4);
  const auto exact = window_of(false, 2, k, Link::nccl);
  const auto rounded = window_of(false, 2, k, Link::nccl, Wire::bf16);
  CAPTURE(k, exact.launches, rounded.launches, exact.buckets);
  REQUIRE(rounded.buckets == exact.buckets);
  // Back into the sums of the replica that steps; of several micro-batches' sums, there on each.
  CHECK(rounded.launches == exact.launches + (k == 1 ? 1 : 3) * exact.buckets);
}
