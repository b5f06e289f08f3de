#include "muster/sharded_embedding.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <sstream>

#include "cpp/catch.h"
#include "muster/mirrored.h"
#include "muster/multi_worker.h"
#include "muster/optim.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::testing;

namespace {

constexpr int64_t kRows = 50, kDim = 6;

// Output and gradient of the weight, for a loss in which every output has a weight of its own.
template <class Module, class... Args>
std::pair<at::Tensor, at::Tensor> run(Module& module, const Args&... args) {
  const auto output = module.forward(args...);
  (output * at::arange(output.numel(), at::kFloat).view(output.sizes())).sum().backward();
  const auto& gradient = module.weight.grad();
  CHECK(gradient.is_sparse());
  return {output.detach(), gradient.to_dense()};
}

template <class Embedding>
struct Net : torch::nn::Module {
  explicit Net(Embedding embedding) : rows(register_module("rows", embedding)) {
    torch::manual_seed(4);
    dense = register_module("dense", torch::nn::Linear(kDim, 1));
  }
  at::Tensor forward(const at::Tensor& ids) { return dense->forward(rows->forward(ids)).squeeze(1); }

  Embedding rows;
  torch::nn::Linear dense{nullptr};
};

ShardedEmbedding ours() {
  return ShardedEmbedding(kRows, kDim, ShardedEmbeddingOptions{.mode = Reduction::mean, .seed = 8});
}

torch::nn::EmbeddingBag theirs() {
  return torch::nn::EmbeddingBag(torch::nn::EmbeddingBagOptions(kRows, kDim)
                                     .mode(torch::kMean)
                                     .sparse(true)
                                     ._weight(ours()->weight.detach().clone()));
}

// Each of `num_workers` has its part of every batch.
template <class Make>
at::Tensor train(Strategy& strategy, const Make& make, int num_workers) {
  auto model = strategy.prepare([&] { return Net(make()); });
  optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.05));
  strategy.prepare(optimizer);
  const auto ids = (at::arange(10 * 12 * 3).view({10, 12, 3}) * 17) % 43;
  const int64_t part = 12 / num_workers;
  for (int64_t step = 0; step < 10; ++step) {
    const auto own = ids[step].narrow(0, strategy.rank() * part, part).clone();
    strategy.step([&](const at::Tensor& x) { return (model->forward(x) - 1).square().mean(); }, own);
  }
  return at::cat({model.module().rows->weight.detach().flatten(), model.module().dense->weight.detach().flatten()});
}

}  // namespace

TEST_CASE("a sharded embedding computes what torch's compute", "[server]") {
  torch::manual_seed(1);
  ShardedEmbedding rows(kRows, kDim);
  auto torch_rows = torch::nn::Embedding(
      torch::nn::EmbeddingOptions(kRows, kDim).sparse(true)._weight(rows->weight.detach().clone()));
  const auto ids = at::randint(kRows, {3, 4}, at::kLong);
  const auto [output, gradient] = run(*rows, ids);
  const auto [torch_output, torch_gradient] = run(*torch_rows, ids);
  CHECK(output.equal(torch_output));
  CHECK(gradient.equal(torch_gradient));

  const auto flat = ids.flatten(), offsets = at::tensor({0, 5, 5}, at::kLong), weights = at::rand({12});
  for (const auto mode : {Reduction::sum, Reduction::mean}) {
    const bool is_sum = mode == Reduction::sum;
    const auto bag_options = torch::nn::EmbeddingBagOptions(kRows, kDim).sparse(true)._weight(rows->weight.detach());
    for (const auto& [x, o, w] : {std::tuple{ids, at::Tensor(), at::Tensor()}, std::tuple{flat, offsets, at::Tensor()},
                                  std::tuple{flat, offsets, is_sum ? weights : at::Tensor()}}) {
      ShardedEmbedding bags(kRows, kDim, ShardedEmbeddingOptions{.mode = mode});
      auto options = bag_options;
      if (is_sum) {
        options.mode(torch::kSum);
      } else {
        options.mode(torch::kMean);
      }
      torch::nn::EmbeddingBag torch_bags(options._weight(bags->weight.detach().clone()));
      const auto [of_bags, gradient_of_bags] = run(*bags, x, o, w);
      const auto [expected, expected_gradient] = run(*torch_bags, x, o, w);
      CHECK(of_bags.equal(expected));
      CHECK(gradient_of_bags.equal(expected_gradient));
    }
  }
  torch::nn::Sequential sequential(ShardedEmbedding(kRows, kDim, ShardedEmbeddingOptions{.mode = Reduction::sum}));
  CHECK(sequential->forward(ids).sizes() == at::IntArrayRef{3, kDim});
}

TEST_CASE("a sharded embedding refuses what it cannot do", "[server]") {
  ShardedEmbedding rows(kRows, kDim);
  for (const int64_t id : {kRows, int64_t{-1}}) {
    CHECK_THROWS_AS(rows->forward(at::tensor({int64_t{0}, id})), InvalidArgument);
  }
  CHECK(rows->forward(at::empty({0, 2}, at::kLong)).sizes() == at::IntArrayRef{0, 2, kDim});
  CHECK_THROWS_AS(rows->forward(at::tensor({0.5F, 1.5F})), InvalidArgument);
  CHECK_THROWS_AS(rows->forward(at::tensor({0, 1}), at::tensor({0})), InvalidArgument);
  CHECK_THROWS_AS(rows->forward(at::tensor({0, 1}), {}, at::rand({2})), InvalidArgument);
  CHECK_THROWS_AS(ShardedEmbedding(0, kDim), InvalidArgument);
  CHECK_THROWS_AS(ShardedEmbedding(kRows, 0), InvalidArgument);
  CHECK_THROWS_AS(ShardedEmbedding(1, 1, ShardedEmbeddingOptions{.scale = -1}), InvalidArgument);
}

TEST_CASE("first values of a sharded embedding follow from the seed, drawn or given", "[server]") {
  const auto weight = [](int64_t rows, std::optional<uint64_t> seed) {
    return ShardedEmbedding(rows, 3, ShardedEmbeddingOptions{.init = RowInit::uniform, .scale = 0.25, .seed = seed})
        ->weight.detach();
  };
  CHECK(weight(5, 1).equal(weight(9, 1).narrow(0, 0, 5)));
  CHECK_FALSE(weight(5, 1).equal(weight(5, 2)));
  CHECK(weight(500, 1).abs().max().item<double>() <= 0.25);
  CHECK(weight(500, 1).abs().max().item<double>() > 0.24);
  torch::manual_seed(3);
  const auto drawn = weight(5, {});
  CHECK_FALSE(weight(5, {}).equal(drawn));
  torch::manual_seed(3);
  CHECK(weight(5, {}).equal(drawn));

  ShardedEmbedding embedding(5, 3);
  const auto copy = std::dynamic_pointer_cast<ShardedEmbeddingImpl>(embedding->clone());
  CHECK(copy->weight.equal(embedding->weight));
  CHECK(copy->weight.data_ptr() != embedding->weight.data_ptr());
  std::ostringstream text;
  text << *ours();
  CHECK(text.str() == "muster::ShardedEmbedding(num_embeddings=50, dim=6, mode=mean)");
}

TEST_CASE("a sharded embedding trains to the same bits on every strategy", "[server]") {
  const StrategyOptions options{.threads_per_replica = 1};
  const auto mirrored = [&](const auto& make) {
    MirroredStrategy strategy({"cpu", "cpu"}, options);
    return train(strategy, make, 1);
  };
  const auto expected = mirrored(&theirs);
  CHECK_FALSE(expected.narrow(0, 0, kRows * kDim).equal(ours()->weight.detach().flatten()));
  CHECK(mirrored(&ours).equal(expected));

  const auto address = free_address();
  CHECK(run_processes(2, [&](int rank) {
          MultiWorkerMirroredStrategy strategy({.rank = rank, .num_workers = 2, .address = address, .local_rank = rank},
                                               {"cpu"}, options);
          MUSTER_CHECK(train(strategy, &ours, 2).equal(expected));
        }) == "");
}
