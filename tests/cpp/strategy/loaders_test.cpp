// Loaders in checkpoints: those that are prepared after load(), those that are gone, and passes that were left.
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <torch/data/datasets/base.h>

#include <memory>
#include <optional>
#include <vector>

#include "checkpoint/saved_tree.h"
#include "checkpoint/snapshot.h"
#include "cpp/catch.h"
#include "cpp/strategy/saved_jobs.h"
#include "muster/mirrored.h"
#include "muster/strategy.h"
#include "support/folder.h"

using namespace muster;
using namespace muster::testing;

namespace {

// 0 to n - 1, in batches of tensors.
struct FirstNumbers : torch::data::datasets::BatchDataset<FirstNumbers, at::Tensor, c10::ArrayRef<size_t>> {
  explicit FirstNumbers(size_t n) : n(n) {}
  at::Tensor get_batch(c10::ArrayRef<size_t> indices) override {
    std::vector<int64_t> numbers(indices.begin(), indices.end());
    return at::tensor(numbers);
  }
  std::optional<size_t> size() const override { return n; }

  size_t n;
};

// The first numbers of the next `count` batches, each of which is stepped with; the loop over them is left then.
std::vector<int64_t> step_over(Strategy& strategy, Small& trained, Loader<FirstNumbers>& loader, size_t count) {
  std::vector<int64_t> numbers;
  for (auto& batch : loader) {
    numbers.push_back(batch[0][0].item<int64_t>());
    strategy.step([&](const at::Tensor& part) { return trained.model->forward(at::ones({part.size(0), 2})).sum(); },
                  batch);
    if (numbers.size() == count) break;
  }
  return numbers;
}

// Evaluates with the first `count` batches; the numbers in them.
std::vector<int64_t> evaluate(Strategy& strategy, Loader<FirstNumbers>& loader, size_t count) {
  std::vector<int64_t> numbers;
  for (auto& batch : loader) {
    numbers.push_back(strategy.run([](const at::Tensor& part) { return part[0]; }, batch)[0].item<int64_t>());
    if (numbers.size() == count) break;
  }
  return numbers;
}

constexpr LoaderOptions kTwos{.batch_size = 2};

Loader<FirstNumbers> loader_of(Strategy& strategy, size_t n = 10, const LoaderOptions& options = kTwos) {
  return strategy.prepare_loader(FirstNumbers(n), options);
}

size_t num_saved(const std::filesystem::path& folder) {
  const auto found = checkpoint::read_newest_snapshot(folder);
  const auto tree =
      checkpoint::decode_tree({std::get<std::string>(found->metadata.at("content")), found->tensors}, "it");
  return tree.get<SavedValue::Dict>().at("loaders").get<SavedValue::List>().size();
}

}  // namespace

TEST_CASE("a loader that evaluated, and is gone, has no part in a checkpoint", "[saving][loader]") {
  const Folder folder;
  const size_t num_evaluated = GENERATE(1, 3);
  for (const int64_t first : {0, 4}) {
    {
      MirroredStrategy strategy;
      Small trained(strategy);
      auto loader = loader_of(strategy);
      strategy.load(folder.path);
      CHECK(step_over(strategy, trained, loader, 2) == std::vector{first, first + 2});
      for (int i = 0; i < 2; ++i) {
        auto another = loader_of(strategy, 6);
        CHECK(evaluate(strategy, another, num_evaluated).size() == num_evaluated);
      }
      strategy.save(folder.path);
    }
    CHECK(num_saved(folder.path) == 1);
  }
}

TEST_CASE("a loader that trained counts once it is gone, too", "[saving][loader]") {
  const Folder folder;
  {
    MirroredStrategy strategy;
    Small trained(strategy);
    {
      auto loader = loader_of(strategy);
      step_over(strategy, trained, loader, 2);
    }
    strategy.save(folder.path);
  }
  MirroredStrategy strategy;
  Small trained(strategy);
  auto loader = loader_of(strategy);
  strategy.load(folder.path);
  CHECK(step_over(strategy, trained, loader, 9) == std::vector<int64_t>{4, 6, 8});
}

TEST_CASE("a loader that is prepared after load() goes on where it was", "[saving][loader]") {
  const Folder folder;
  {
    MirroredStrategy strategy;
    Small trained(strategy);
    auto first = loader_of(strategy);
    auto second = loader_of(strategy, 8);
    step_over(strategy, trained, first, 2);
    step_over(strategy, trained, second, 1);
    strategy.save(folder.path);
  }
  SECTION("when others were saved between, too") {
    MirroredStrategy strategy;
    Small trained(strategy);
    strategy.load(folder.path);
    strategy.save(folder.path);
  }
  MirroredStrategy strategy;
  Small trained(strategy);
  auto first = loader_of(strategy);
  strategy.load(folder.path);
  CHECK(step_over(strategy, trained, first, 1) == std::vector<int64_t>{0});  // it was left, and a step made since
  CHECK(first.epoch() == 1);
  CHECK_THROWS_AS(loader_of(strategy, 12), LayoutMismatch);
  auto second = loader_of(strategy, 8);
  CHECK(step_over(strategy, trained, second, 9) == std::vector<int64_t>{2, 4, 6});
  auto third = loader_of(strategy, 4);
  CHECK(step_over(strategy, trained, third, 9) == std::vector<int64_t>{0, 2});
  strategy.load(folder.path);  // a checkpoint from before the third
  CHECK(step_over(strategy, trained, second, 1) == std::vector<int64_t>{2});
  CHECK(third.epoch() == 1);
}

TEST_CASE("a pass that was left counts as an epoch once a step was made", "[loader]") {
  MirroredStrategy strategy;
  Small trained(strategy);
  auto loader = loader_of(strategy);
  auto other = loader_of(strategy, 6);
  evaluate(strategy, other, 1);
  CHECK((other.state() == LoaderState{0, 1}));
  auto pass = other.begin();
  CHECK((other.state() == LoaderState{1, 1}));
  step_over(strategy, trained, loader, 2);
  CHECK((other.state() == LoaderState{1, 1}));  // its loop is there
  CHECK((loader.state() == LoaderState{0, 2}));
  pass = {};
  trained.step(strategy);
  CHECK((other.state() == LoaderState{2, 0}));
  CHECK((loader.state() == LoaderState{1, 0}));
}
