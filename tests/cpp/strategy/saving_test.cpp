// Strategy::save and load: a run that is stopped, and gone on with in another strategy, ends with the same bits.
#include <ATen/ops/arange.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/zeros.h>
#include <torch/data/datasets/base.h>
#include <torch/data/datasets/stateful.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/utils.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <fstream>
#include <limits>

#include "checkpoint/snapshot.h"
#include "cpp/catch.h"
#include "cpp/strategy/saved_jobs.h"
#include "muster/mirrored.h"
#include "muster/optim.h"
#include "muster/parameter_server.h"
#include "muster/strategy.h"
#include "strategy/saved_passes.h"
#include "support/folder.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::testing;

namespace {

namespace fs = std::filesystem;
namespace nn = torch::nn;
using Example = torch::data::Example<>;

constexpr int64_t kSamples = 40;
constexpr int64_t kBatch = 8;

struct Points : torch::data::datasets::BatchDataset<Points, Example, c10::ArrayRef<size_t>> {
  Example get_batch(c10::ArrayRef<size_t> indices) override {
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> targets;
    for (const size_t i : indices) {
      inputs.push_back(at::sin(at::arange(6, at::kFloat) * static_cast<double>(i + 1)));
      targets.push_back(at::full({}, static_cast<int64_t>(i % 3), at::kLong));
    }
    return {at::stack(inputs), at::stack(targets)};
  }
  std::optional<size_t> size() const override { return kSamples; }
};

// The first values are fixed: workers that are threads share a generator.
nn::Sequential build() {
  nn::Sequential model(nn::Linear(6, 16), nn::BatchNorm1d(16), nn::ReLU(), nn::Dropout(0.2), nn::Linear(16, 3));
  const at::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) {
    parameter.copy_(at::sin(at::arange(parameter.numel(), at::kFloat)).view(parameter.sizes()));
  }
  return model;
}

std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const auto& tensor : tensors) result.push_back(tensor.detach().clone());
  return result;
}

bool equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const at::Tensor& x, const at::Tensor& y) { return x.equal(y); });
}

// Two epochs; with `stop_after` it saves after so many steps and leaves.
template <class Optimizer, class Options>
std::vector<at::Tensor> train(Strategy& strategy, const std::filesystem::path& folder, const Options& options,
                              std::optional<int64_t> stop_after = {}) {
  auto model = strategy.prepare([] { return build(); });
  Optimizer optimizer(model->parameters(), options);
  strategy.prepare(optimizer);
  auto loader = strategy.prepare_loader(Points(), {.batch_size = kBatch, .shuffle = true});
  const auto state = strategy.load(folder);
  if (state) MUSTER_CHECK(state->at("note").template get<std::string>() == "kept");
  while (loader.epoch() < 2) {
    for (auto& batch : loader) {
      strategy.step(
          [&](const Example& part) { return nn::functional::cross_entropy(model->forward(part.data), part.target); },
          batch);
      if (strategy.steps() == stop_after) {
        strategy.save(folder, {{"note", "kept"}}, {.keep = 2});
        strategy.close();
        return {};
      }
    }
  }
  auto result = copies(model.module().parameters());
  for (const auto& buffer : copies(model.module().buffers())) result.push_back(buffer);
  MUSTER_CHECK(strategy.steps() == 2 * kSamples / kBatch);
  return result;
}

using Train = std::function<std::vector<at::Tensor>(Strategy&, const std::filesystem::path&, std::optional<int64_t>)>;

template <class Optimizer, class Options>
Train trained_by(const Options& options) {
  return [options](Strategy& strategy, const std::filesystem::path& folder, std::optional<int64_t> stop_after) {
    return train<Optimizer>(strategy, folder, options, stop_after);
  };
}

constexpr int64_t kOutputs = 40'000;  // a weight of 320 kB, which both write

// Whether a worker wrote files of the newest checkpoint.
bool has_written(int rank, const fs::path& folder) {
  const auto prefix = "worker-" + std::to_string(rank) + '-';
  return std::ranges::any_of(fs::directory_iterator(folder), [&](const fs::directory_entry& entry) {
    return entry.path().filename().string().starts_with(prefix);
  });
}

}  // namespace

TEST_CASE("a run that was stopped goes on with the same bits", "[saving]") {
  const auto train =
      GENERATE(trained_by<muster::optim::AdamW>(torch::optim::AdamWOptions(1e-2).amsgrad(true)),
               trained_by<muster::optim::SGD>(torch::optim::SGDOptions(1e-2).momentum(0.9)),
               trained_by<muster::optim::SGD>(torch::optim::SGDOptions(1e-2)),
               trained_by<muster::optim::Adagrad>(torch::optim::AdagradOptions(1e-2).initial_accumulator_value(0.1)),
               trained_by<torch::optim::Adam>(torch::optim::AdamOptions(1e-2)),
               trained_by<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1e-2).momentum(0.5).centered(true)));
  const int replicas = GENERATE(1, 2);
  const int64_t stop_after = GENERATE(3, 5);  // 5: at an epoch's last batch
  torch::manual_seed(3);
  MirroredStrategy undisturbed(cpus(replicas));
  const auto expected = train(undisturbed, Folder().path / "none", {});
  const Folder folder;
  {
    torch::manual_seed(3);
    MirroredStrategy first(cpus(replicas));
    train(first, folder.path, stop_after);
  }
  torch::manual_seed(99);  // all that follows from the seed is in the checkpoint
  MirroredStrategy second(cpus(replicas));
  CHECK(equal(train(second, folder.path, {}), expected));
}

TEST_CASE("batches of any size go on with the same bits", "[saving]") {
  const auto train = [](const fs::path& folder, int64_t first, int64_t end) {
    MirroredStrategy strategy(cpus(2));
    auto model = strategy.prepare([] { return build(); });
    muster::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    strategy.prepare(optimizer);
    strategy.load(folder);
    for (int64_t step = first; step < end; ++step) {
      const auto rows = at::sin(at::arange(6 * (5 + 3 * step), at::kFloat)).view({-1, 6});
      strategy.step([&](const at::Tensor& part) { return model->forward(part).square().mean(); }, rows);
    }
    strategy.save(folder);
    return copies(model.module().parameters());
  };
  const auto expected = train(Folder().path, 0, 6);
  for (int64_t stop_after = 1; stop_after < 6; ++stop_after) {
    const Folder folder;
    train(folder.path, 0, stop_after);
    CHECK(equal(train(folder.path, stop_after, 6), expected));
  }
}

TEST_CASE("workers go on with the same bits, with state that is divided and into a strategy of one", "[saving]") {
  StrategyOptions options;
  options.shard_optimizer = true;  // workers that are threads have no memory in common for state that each has whole
  options.fuse = options.shard_optimizer;  // workers that are threads have no common memory to step into
  const auto train = trained_by<muster::optim::AdamW>(torch::optim::AdamWOptions(1e-2));
  const Folder folder;
  std::vector<at::Tensor> expected;
  torch::manual_seed(3);
  run_workers(
      [&](Strategy& strategy) {
        auto result = train(strategy, folder.path / "none", {});
        if (strategy.is_chief()) expected = std::move(result);
      },
      options);
  torch::manual_seed(3);
  const auto rank_folder = [&](Strategy& strategy) {
    return strategy.is_chief() ? folder.path / "chief" : folder.path / "other";  // the chief's alone is used
  };
  run_workers([&](Strategy& strategy) { train(strategy, rank_folder(strategy), 3); }, options);
  CHECK(!std::filesystem::exists(folder.path / "other"));
  SECTION("two workers") {
    run_workers([&](Strategy& strategy) { MUSTER_CHECK(equal(train(strategy, rank_folder(strategy), {}), expected)); },
                options);
  }
  SECTION("two replicas of one") {
    MirroredStrategy strategy(cpus(2));
    CHECK(equal(train(strategy, folder.path / "chief", {}), expected));
  }
}

TEST_CASE("an epoch that servers deal goes on, and under other strategies", "[saving]") {
  const auto train = trained_by<muster::optim::AdamW>(torch::optim::AdamWOptions(1e-2));
  const auto run = [&](bool is_dealt, const fs::path& folder, std::optional<int64_t> stop_after) {
    if (is_dealt) {
      ParameterServerStrategy strategy(Cluster{}, {.staleness = 1});
      return train(strategy, folder, stop_after);
    }
    MirroredStrategy strategy(cpus(1));
    return train(strategy, folder, stop_after);
  };
  const auto [first, second] = GENERATE(std::pair(true, true), std::pair(true, false), std::pair(false, true));
  const int64_t stop_after = GENERATE(3, 5);  // 5: at an epoch's last batch
  torch::manual_seed(3);
  const auto expected = run(false, Folder().path / "none", {});
  const Folder folder;
  torch::manual_seed(3);
  run(first, folder.path, stop_after);
  torch::manual_seed(99);
  CHECK(equal(run(second, folder.path, {}), expected));
}

TEST_CASE("a place within an epoch is of a loader that counts as the saved one did", "[saving]") {
  const Folder folder;
  struct Numbers : torch::data::datasets::Dataset<Numbers, at::Tensor> {
    explicit Numbers(int64_t samples) : samples_(samples) {}
    at::Tensor get(size_t index) override { return at::scalar_tensor(static_cast<int64_t>(index), at::kLong); }
    std::optional<size_t> size() const override { return static_cast<size_t>(samples_); }

   private:
    int64_t samples_;
  };
  const auto run = [&](const LoaderOptions& options, int64_t samples, bool loads, int64_t batches) {
    MirroredStrategy strategy;
    auto loader = strategy.prepare_loader(Numbers(samples), options);
    if (loads) strategy.load(folder.path);
    auto pass = loader.begin();
    for (int64_t i = 0; i < batches; ++i) ++pass;
    if (!loads) strategy.save(folder.path);
  };
  const auto goes_on = [&](const LoaderOptions& options, int64_t samples) { run(options, samples, true, 0); };
  run({.batch_size = 2}, 10, false, 1);
  goes_on({.batch_size = 2}, 10);
  CHECK_THROWS_WITH(
      goes_on({.batch_size = 4}, 10),
      ContainsSubstring("loader 0: the checkpoint is of the middle of an epoch with batches of 2, and now 4"));
  CHECK_THROWS_WITH(goes_on({.batch_size = 2}, 12), ContainsSubstring("with a data set of 10, and now 12"));
  run({.batch_size = 2}, 10, false, 5);  // an epoch's end
  goes_on({.batch_size = 4}, 12);
  run({.batch_size = 2, .sharded = true}, 10, false, 1);
  goes_on({.batch_size = 4, .sharded = true}, 12);
}

TEST_CASE("where a loader goes on is what can be", "[saving]") {
  const std::vector<server::PassProgress> passes{{4, 2, 10, 6, {1, 5}}, {4, 3, 10, 2, {}}};
  const auto saved = muster::detail::saved_loader(2, passes);
  CHECK((muster::detail::passes_in(saved, 4) == passes));
  CHECK((muster::detail::place_in(saved) == LoaderState{2, 1}));  // what is behind it comes once more
  CHECK((muster::detail::place_in(muster::detail::saved_loader(3, passes)) == LoaderState{3, 2}));
  CHECK((muster::detail::place_in(muster::detail::saved_loader(5, passes)) == LoaderState{5, 0}));
  auto of_one_worker = muster::detail::saved_loader(2, {});
  of_one_worker.insert_or_assign("batches", int64_t{7});
  CHECK((muster::detail::passes_in(of_one_worker, 1) == std::vector<server::PassProgress>{{1, 2, 0, 7, {}}}));
  for (const auto& wrong : {server::PassProgress{4, 2, 10, 6, {6}}, server::PassProgress{4, 2, 10, 6, {1, 1}}}) {
    CHECK_THROWS_AS(muster::detail::passes_in(muster::detail::saved_loader(2, {wrong}), 4), InvalidArgument);
  }
  of_one_worker.insert_or_assign("batches", int64_t{-1});
  CHECK_THROWS_AS(muster::detail::place_in(of_one_worker), InvalidArgument);
}

TEST_CASE("the loss scale of fp16 goes on, whether options name it or not", "[saving]") {
  StrategyOptions options;
  options.precision = Precision::fp16;
  if (GENERATE(false, true)) options.loss_scale = LossScale();
  const Folder folder;
  const auto scale_after = [&](const StrategyOptions& chosen) {
    MirroredStrategy strategy(cpus(1), chosen);
    Small job(strategy);
    const bool goes_on = strategy.load(folder.path).has_value();
    const double factor = goes_on ? 1.0 / 16 : std::numeric_limits<double>::infinity();
    const auto result =
        strategy.step([&](const at::Tensor& x) { return job.model->forward(x).sum() * factor; }, at::ones({2, 2}));
    if (!goes_on) strategy.save(folder.path);
    return result.loss_scale.item<double>();
  };
  CHECK(scale_after(options) == 32768);
  CHECK(scale_after(options) == 32768);
  CHECK(scale_after({}) == 1);
}

TEST_CASE("low-precision parameters go on from their fp32 copies", "[saving]") {
  const bool counts_steps = GENERATE(true, false);
  const auto run = [&](Strategy& strategy, const std::filesystem::path& folder, bool stops,
                       at::ScalarType dtype = at::kBFloat16) {
    auto model = strategy.prepare([&] {
      auto linear = std::make_shared<nn::LinearImpl>(4, 2);
      linear->to(dtype);
      return linear;
    });
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (counts_steps) {
      optimizer = std::make_unique<muster::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(1e-4));
    } else {
      optimizer = std::make_unique<muster::optim::SGD>(model->parameters(), torch::optim::SGDOptions(1e-4));
    }
    strategy.prepare(*optimizer);
    strategy.load(folder);
    while (strategy.steps() < 8) {
      if (dtype == at::kFloat) {  // as it was loaded
        strategy.save(folder);
        strategy.close();
        break;
      }
      const auto x = (at::arange(8, at::kFloat).view({2, 4}) / 7 + strategy.steps()).to(dtype);
      strategy.step([&](const at::Tensor& part) { return model->forward(part).square().mean(); }, x);
      if (stops && strategy.steps() == 4) {
        strategy.save(folder);
        strategy.close();
        break;
      }
    }
    return copies(model.module().parameters());
  };
  const Folder folder;
  torch::manual_seed(0);
  MirroredStrategy undisturbed(cpus(1));
  const auto expected = run(undisturbed, folder.path / "none", false);
  torch::manual_seed(0);
  MirroredStrategy first(cpus(1));
  run(first, folder.path, true);
  MirroredStrategy second(cpus(1));
  CHECK(equal(run(second, folder.path, false), expected));

  MirroredStrategy wide(cpus(1));
  const auto masters = run(wide, folder.path, false, at::kFloat);
  CHECK_FALSE(masters[0].to(at::kBFloat16).to(at::kFloat).equal(masters[0]));
  MirroredStrategy third(cpus(1));
  CHECK(equal(run(third, folder.path, false), expected));
}

TEST_CASE("optimizer state is saved with its parameter where groups have another order since the last step",
          "[saving]") {
  const bool on_servers = GENERATE(false, true);
  const auto make = [&]() -> std::unique_ptr<Strategy> {
    if (on_servers) return std::make_unique<ParameterServerStrategy>(Cluster{});
    return std::make_unique<MirroredStrategy>(cpus(1));
  };
  struct Job {
    explicit Job(Strategy& strategy)
        : model(strategy.prepare([] { return nn::Sequential(nn::Linear(3, 3), nn::Linear(3, 3)).ptr(); })),
          optimizer({group(0), group(1)}, torch::optim::AdamWOptions(0.1)) {
      strategy.prepare(optimizer);
    }
    torch::optim::OptimizerParamGroup group(size_t layer) {
      return {model.module().children()[layer]->parameters(), std::make_unique<torch::optim::AdamWOptions>(0.1)};
    }
    void step(Strategy& strategy) {
      strategy.step([&](const at::Tensor& x) { return model->forward(x).square().mean(); },
                    at::arange(12, at::kFloat).view({4, 3}));
    }
    Replicated<nn::SequentialImpl> model;
    muster::optim::AdamW optimizer;
  };
  const Folder folder;
  std::vector<at::Tensor> expected;
  for (const bool is_reversed : {false, true}) {
    torch::manual_seed(0);
    const auto first = make();
    Job job(*first);
    job.step(*first);
    if (is_reversed) std::reverse(job.optimizer.param_groups().begin(), job.optimizer.param_groups().end());
    const auto path = folder.path / (is_reversed ? "reversed" : "plain");
    first->save(path);
    first->close();
    MirroredStrategy second(cpus(1));
    Job next(second);
    if (is_reversed) std::reverse(next.optimizer.param_groups().begin(), next.optimizer.param_groups().end());
    CHECK(second.load(path));
    next.step(second);
    const auto parameters = copies(next.model.module().parameters());
    if (is_reversed) CHECK(equal(parameters, expected));
    expected = parameters;
  }
}

TEST_CASE("a stream goes on after the batches that were trained on", "[saving]") {
  struct Counter : torch::data::datasets::StatefulDataset<Counter, at::Tensor, size_t> {
    std::optional<at::Tensor> get_batch(size_t n) override {
      if (next >= 10) return std::nullopt;
      const auto first = std::exchange(next, next + static_cast<int64_t>(n));
      return at::arange(first, next);
    }
    std::optional<size_t> size() const override { return std::nullopt; }
    void reset() override { next = 0; }
    void save(torch::serialize::OutputArchive&) const override {}
    void load(torch::serialize::InputArchive&) override {}
    int64_t next = 0;
  };
  const int threads = GENERATE(0, 1);
  MirroredStrategy strategy(cpus(1));
  auto loader = strategy.prepare_loader(Counter(), {.batch_size = 2, .workers = threads});
  const auto firsts = [&] {
    std::vector<int64_t> values;
    for (auto& batch : loader) values.push_back(batch[0][0].template item<int64_t>());
    return values;
  };
  auto pass = loader.begin();
  ++pass;
  CHECK(loader.state() == LoaderState{0, 2});
  loader.load_state({3, 3});
  CHECK(loader.epoch() == 3);
  CHECK(firsts() == std::vector<int64_t>{6, 8});
  CHECK(loader.state() == LoaderState{4, 0});
  CHECK(firsts().size() == 5);
  loader.load_state({5, 5});
  CHECK(firsts().empty());
  CHECK(loader.state() == LoaderState{6, 0});
  CHECK_THROWS_AS(loader.load_state({-1, 0}), InvalidArgument);
}

TEST_CASE("a checkpoint of another model changes nothing", "[saving]") {
  const Folder folder;
  MirroredStrategy strategy(cpus(1));
  Small saved(strategy);
  saved.step(strategy);
  strategy.save(folder.path);
  strategy.close();
  MirroredStrategy other(cpus(1));
  SECTION("another shape") {
    Small wider(other, 3);
    const auto before = copies(wider.model->parameters());
    CHECK_THROWS_WITH(other.load(folder.path),
                      ContainsSubstring("'bias' of module 0 has shape [3], and in the checkpoint [1]"));
    CHECK(equal(copies(wider.model->parameters()), before));
    CHECK(other.steps() == 0);
  }
  SECTION("another optimizer") {
    auto model = other.prepare([] { return nn::Linear(2, 1); });
    const auto before = copies(model->parameters());
    torch::optim::RMSprop optimizer(model->parameters());
    other.prepare(optimizer);
    CHECK_THROWS_WITH(other.load(folder.path),
                      ContainsSubstring("optimizer 0 is RMSprop, and in the checkpoint AdamW"));
    CHECK(equal(copies(model->parameters()), before));
  }
  SECTION("fewer optimizers") {
    other.prepare([] { return nn::Linear(2, 1); });
    CHECK_THROWS_AS(other.load(folder.path), LayoutMismatch);
    CHECK_THROWS_WITH(other.load(folder.path),
                      ContainsSubstring("snapshot-0000000001': the checkpoint is of 1 optimizers"));
  }
  SECTION("other names") {
    auto model = other.prepare([] { return nn::Sequential(nn::Linear(2, 1)); });
    muster::optim::AdamW optimizer(model->parameters());
    other.prepare(optimizer);
    CHECK_THROWS_WITH(other.load(folder.path), ContainsSubstring("lacks '0.bias' of module 0"));
  }
}

TEST_CASE("options of the optimizer's groups come back", "[saving]") {
  const Folder folder;
  {
    MirroredStrategy strategy(cpus(1));
    Small small(strategy, 1, 0.25);
    strategy.save(folder.path);
  }
  MirroredStrategy strategy(cpus(1));
  Small small(strategy);
  strategy.load(folder.path);
  CHECK(small.optimizer.param_groups()[0].options().get_lr() == 0.25);
}

TEST_CASE("what cannot be saved or loaded is said before anything is done", "[saving]") {
  const Folder folder;
  StrategyOptions options;
  options.accumulate = 2;
  MirroredStrategy strategy(cpus(1), options);
  Small small(strategy);
  CHECK(!strategy.load(folder.path / "nothing"));
  CHECK_THROWS_WITH(strategy.save(folder.path, {}, {.keep = 0}), ContainsSubstring("keep=0"));
  CHECK_THROWS_WITH(strategy.save(folder.path, {{"rows", at::eye(2).to_sparse()}}), ContainsSubstring("state/rows"));
  small.step(strategy);
  CHECK_THROWS_WITH(strategy.save(folder.path), ContainsSubstring("flush()"));
  CHECK_THROWS_WITH(strategy.load(folder.path), ContainsSubstring("flush()"));
  small.step(strategy);
  strategy.save(folder.path);
  CHECK_THROWS_WITH(strategy.load(folder.path / "1"), ContainsSubstring("snapshot-0000000001"));
  CHECK_THROWS_WITH(strategy.save(folder.path / "snapshot-0000000001"), ContainsSubstring("is called as one"));
  strategy.close();
  CHECK_THROWS_AS(strategy.save(folder.path), InvalidArgument);
}

TEST_CASE("a step cannot save", "[saving]") {
  const Folder folder;
  MirroredStrategy strategy(cpus(1));
  Small small(strategy);
  CHECK_THROWS_AS(strategy.step(
                      [&](const at::Tensor& x) {
                        strategy.save(folder.path);
                        return small.model->forward(x).sum();
                      },
                      at::ones({2, 2})),
                  InvalidArgument);
}

TEST_CASE("a folder that cannot be written is an error on all workers", "[saving]") {
  const Folder folder;
  std::ofstream(folder.path / "file") << "no folder";
  run_workers([&](Strategy& strategy) {
    message_of<CheckpointError>([&] { strategy.save(folder.path / "file" / "inside"); });
    message_of<CheckpointError>([&] { strategy.load(folder.path / "file"); });
    MUSTER_CHECK(!strategy.load(folder.path / "nothing"));
  });
}

TEST_CASE("what one worker cannot load, none loads", "[saving]") {
  const Folder folder;
  run_workers([&](Strategy& strategy) {
    const auto model = strategy.prepare([] { return build(); });
    strategy.save(folder.path);
    const at::NoGradGuard no_grad;
    auto weight = model.module().parameters().front();
    weight.fill_(7);
    if (strategy.rank() == 1) model.module().register_buffer("own", at::zeros({1}));
    const auto message = message_of<LayoutMismatch>([&] { strategy.load(folder.path); });
    MUSTER_CHECK(contains(message, "own"));
    MUSTER_CHECK(weight.eq(7).all().item<bool>());
  });
}

TEST_CASE("a damaged checkpoint is passed over for the one before", "[saving]") {
  const Folder folder;
  MirroredStrategy strategy(cpus(1));
  Small small(strategy);
  small.step(strategy);
  strategy.save(folder.path);
  const auto expected = copies(small.model->parameters());
  small.step(strategy);
  strategy.save(folder.path);
  strategy.close();
  const auto newest = checkpoint::list_snapshots(folder.path).back().folder;
  std::fstream(newest / "shard-00000.safetensors", std::ios::in | std::ios::out | std::ios::binary)
          .seekp(-1, std::ios::end)
      << 'x';
  MirroredStrategy next(cpus(1));
  Small again(next);
  CHECK(next.load(folder.path));
  CHECK(next.steps() == 1);
  CHECK(equal(copies(again.model->parameters()), expected));
}

TEST_CASE("workers that see no common folder save in their own, and load what they have together", "[saving]") {
  const testing::Folder folder;
  StrategyOptions options;
  options.shard_optimizer = true;
  const auto own = [&](int rank) { return folder.path / std::to_string(rank); };
  const std::string newest = "snapshot-0000000002";
  const auto run = [&](const std::function<void(Strategy&, Small&)>& body) {
    run_workers(
        [&](Strategy& strategy) {
          Small small(strategy, kOutputs);
          body(strategy, small);
          strategy.close();
        },
        options, c10::make_intrusive<c10d::HashStore>());
  };
  for (const int rank : {0, 1}) fs::create_directory(own(rank));
  std::vector<std::vector<at::Tensor>> values(3);
  run([&](Strategy& strategy, Small& small) {
    for (size_t time = 0; time < 2; ++time) {
      small.step(strategy);
      strategy.save(own(strategy.rank()), {{"time", static_cast<int64_t>(time)}});
      if (strategy.is_chief()) values[time] = copies(small.model->parameters());
    }
    small.step(strategy);
    if (strategy.is_chief()) values[2] = copies(small.model->parameters());
  });
  CHECK(has_written(1, own(1) / newest));
  CHECK_FALSE(has_written(1, own(0) / newest));
  CHECK_FALSE(fs::exists(own(1) / newest / "manifest.json"));
  // Its state shows in the next step.
  run([&](Strategy& strategy, Small& small) {
    MUSTER_CHECK(strategy.load(own(strategy.rank()))->at("time").get<int64_t>() == 1);
    small.step(strategy);
    MUSTER_CHECK(equal(copies(small.model->parameters()), values[2]));
  });
  fs::remove_all(own(1) / newest);
  run([&](Strategy& strategy, Small& small) {
    MUSTER_CHECK(strategy.load(own(strategy.rank()))->at("time").get<int64_t>() == 0);
    MUSTER_CHECK(equal(copies(small.model->parameters()), values[0]));
    small.step(strategy);
    MUSTER_CHECK(equal(copies(small.model->parameters()), values[1]));
  });
}

TEST_CASE("a folder of no files, or that cannot be looked into, is a damaged checkpoint of a worker", "[saving]") {
  const testing::Folder folder;
  const auto own = [&](int rank) { return folder.path / std::to_string(rank); };
  const std::string name = "snapshot-0000000002";
  const int damaged = GENERATE(0, 1);
  fs::create_directories(own(damaged) / name);
  if (GENERATE(true, false)) fs::create_symlink("manifest.json", own(damaged) / name / "manifest.json");  // for ever
  run_workers([&](Strategy& strategy) {
    const Small small(strategy);
    const auto error = message_of<CheckpointError>([&] { strategy.load(own(strategy.rank())); });
    MUSTER_CHECK(error.find("'" + own(strategy.rank()).string()) != std::string::npos);
    strategy.close();
  });
}

TEST_CASE("workers that see one folder write a checkpoint together", "[saving]") {
  const testing::Folder folder;
  StrategyOptions options;
  options.shard_optimizer = true;  // workers that are threads have no memory in common for state that each has whole
  const auto alone = [&](int rank) { return folder.path / ("alone-" + std::to_string(rank)); };
  run_workers(
      [&](Strategy& strategy) {
        Small small(strategy, kOutputs);
        small.step(strategy);
        const SavedState state{{"rank", strategy.rank()}};
        for (int time = 0; time < 2; ++time) strategy.save(folder.path / "together", state, {.keep = 1});
        strategy.save(alone(strategy.rank()), state);
        strategy.close();
      },
      options);
  const auto together = checkpoint::read_newest_snapshot(folder.path / "together");
  const auto of_one = checkpoint::read_newest_snapshot(alone(0));
  REQUIRE(together);
  REQUIRE(of_one);
  CHECK(together->folder.filename() == "snapshot-0000000002");
  for (int rank = 0; rank < 2; ++rank) CHECK(has_written(rank, together->folder));
  CHECK_FALSE(has_written(0, of_one->folder));
  CHECK_FALSE(fs::exists(alone(1)));
  CHECK((together->metadata == of_one->metadata));
  CHECK(together->tensors.size() == of_one->tensors.size());
  for (const auto& [name, tensor] : together->tensors) CHECK(tensor.equal(of_one->tensors.at(name)));
  auto strategy = MirroredStrategy({"cpu"});
  Small small(strategy, kOutputs);
  CHECK(strategy.load(folder.path / "together")->at("rank").get<int64_t>() == 0);
  CHECK(strategy.steps() == 1);
}
