// When a C++ loader without threads reads a batch: when the loop asks for it, where nobody must know a pass's end
// before.
#include <ATen/ops/empty.h>
#include <torch/data/datasets/base.h>
#include <torch/data/datasets/stateful.h>
#include <torch/nn/modules/linear.h>

#include <deque>
#include <optional>
#include <stdexcept>
#include <vector>

#include "cpp/catch.h"
#include "muster/mirrored.h"
#include "muster/strategy.h"

using namespace muster;

namespace {

// The numbers from 0 on, in batches in one and the same memory.
struct RefilledStream : torch::data::datasets::StatefulDataset<RefilledStream, at::Tensor> {
  explicit RefilledStream(int64_t batches) : batches(batches) {}
  std::optional<at::Tensor> get_batch(size_t n) override {
    if (next == batches) return std::nullopt;
    if (!memory.defined()) memory = at::empty({static_cast<int64_t>(n)});
    return memory.fill_(static_cast<double>(next++));
  }
  void reset() override { next = 0; }
  std::optional<size_t> size() const override { return std::nullopt; }
  void save(torch::serialize::OutputArchive&) const override {}
  void load(torch::serialize::InputArchive&) override {}

  int64_t batches;
  int64_t next = 0;
  at::Tensor memory;
};

// Likewise, read by index.
struct RefilledNumbers : torch::data::datasets::BatchDataset<RefilledNumbers, at::Tensor, c10::ArrayRef<size_t>> {
  at::Tensor get_batch(c10::ArrayRef<size_t> indices) override {
    if (indices[0] == broken) throw std::runtime_error("broken");
    return memory.fill_(static_cast<double>(indices[0] / indices.size()));
  }
  std::optional<size_t> size() const override { return 10; }

  size_t broken = 10;
  at::Tensor memory = at::empty({2});
};

// What a loop put there.
struct Queue : torch::data::datasets::StatefulDataset<Queue, at::Tensor> {
  explicit Queue(std::deque<int64_t>* items) : items(items) {}
  std::optional<at::Tensor> get_batch(size_t) override {
    if (items->empty()) return std::nullopt;
    const auto item = items->front();
    items->pop_front();
    return at::full({1}, item, at::kLong);
  }
  void reset() override {}
  std::optional<size_t> size() const override { return std::nullopt; }
  void save(torch::serialize::OutputArchive&) const override {}
  void load(torch::serialize::InputArchive&) override {}

  std::deque<int64_t>* items;
};

using Values = std::vector<double>;

template <class Loader>
Values numbers_in(Strategy& strategy, Loader& loader) {
  Values numbers;
  for (auto& batch : loader) {
    strategy.run([&](const at::Tensor& part) { return part; }, batch);
    numbers.push_back(batch[0][0].template item<double>());
  }
  return numbers;
}

using Model = Replicated<torch::nn::LinearImpl>;

Model model_of(Strategy& strategy) {
  return strategy.prepare([] { return torch::nn::Linear(1, 1); });
}

// Steps over the batches, or tensors made of them; whether each step closed its window.
template <class Batches>
std::vector<bool> steps_over(Strategy& strategy, const Model& model, Batches& batches, bool own_tensors = false) {
  const auto loss = [&](const at::Tensor& x) { return model->forward(x.to(at::kFloat).view({-1, 1})).mean(); };
  std::vector<bool> stepped;
  for (auto& batch : batches) {
    stepped.push_back((own_tensors ? strategy.step(loss, batch[0].clone()) : strategy.step(loss, batch)).stepped);
  }
  return stepped;
}

}  // namespace

TEST_CASE("memory that data fill again is a batch's until the next one", "[loader]") {
  MirroredStrategy strategy;
  auto stream = strategy.prepare_loader(RefilledStream(4), {.batch_size = 2});
  auto numbers = strategy.prepare_loader(RefilledNumbers(), {.batch_size = 2});
  for (int epoch = 0; epoch < 2; ++epoch) {
    CHECK(numbers_in(strategy, stream) == Values{0, 1, 2, 3});
    CHECK(numbers_in(strategy, numbers) == Values{0, 1, 2, 3, 4});
  }
}

TEST_CASE("a loop may feed its data, and lose none where it ends early", "[loader]") {
  MirroredStrategy strategy;
  std::deque<int64_t> items{7};
  auto loader = strategy.prepare_loader(Queue(&items));
  std::vector<int64_t> seen;
  for (auto& batch : loader) {
    seen.push_back(batch[0].item<int64_t>());
    if (seen.back() < 10) items.push_back(seen.back() + 1);
  }
  CHECK(seen == std::vector<int64_t>{7, 8, 9, 10});
  items = {1, 2, 3};
  for (const size_t left : {2, 1}) {
    for ([[maybe_unused]] auto& batch : loader) break;
    CHECK(items.size() == left);
  }
}

TEST_CASE("the end of a pass closes the window, whether or not it is known", "[loader]") {
  const bool own_tensors = GENERATE(false, true);
  MirroredStrategy strategy(std::vector<std::string>{"cpu"}, {.accumulate = 2});
  SECTION("by index it is") {
    auto loader = strategy.prepare_loader(RefilledNumbers(), {.batch_size = 2});
    CHECK(steps_over(strategy, model_of(strategy), loader, own_tensors) ==
          std::vector<bool>{false, true, false, true, true});
  }
  SECTION("of a stream it is looked for") {
    auto loader = strategy.prepare_loader(RefilledStream(3), {.batch_size = 2});
    CHECK(steps_over(strategy, model_of(strategy), loader, own_tensors) == std::vector<bool>{false, true, true});
  }
}

TEST_CASE("batches that were fetched before their steps close the pass's last window", "[loader]") {
  MirroredStrategy strategy(std::vector<std::string>{"cpu"}, {.accumulate = 2});
  const auto model = model_of(strategy);
  auto loader = strategy.prepare_loader(RefilledStream(3), {.batch_size = 2});
  for (int epoch = 0; epoch < 2; ++epoch) {
    std::vector<PerReplica<at::Tensor>> fetched;
    for (const auto& batch : loader) fetched.push_back(batch);
    CHECK(steps_over(strategy, model, fetched) == std::vector<bool>{false, true, true});
  }
}

TEST_CASE("a step that fills its window reads nothing ahead", "[loader]") {
  MirroredStrategy strategy(std::vector<std::string>{"cpu"}, {.accumulate = 2});
  std::deque<int64_t> items{0, 1, 2, 3};
  auto loader = strategy.prepare_loader(Queue(&items));
  const auto model = model_of(strategy);
  std::vector<size_t> left;
  for (auto& batch : loader) {
    strategy.step([&](const at::Tensor& x) { return model->forward(x.to(at::kFloat).view({-1, 1})).mean(); }, batch);
    left.push_back(items.size());
  }
  CHECK(left == std::vector<size_t>{2, 2, 0, 0});
}

TEST_CASE("a batch that cannot be read is passed over when it is asked for", "[loader]") {
  MirroredStrategy strategy;
  RefilledNumbers data;
  data.broken = 4;
  auto loader = strategy.prepare_loader(data, {.batch_size = 2});
  auto pass = loader.begin();
  ++pass;
  CHECK((loader.state() == LoaderState{0, 2}));
  CHECK_THROWS_WITH(++pass, "broken");
  CHECK((loader.state() == LoaderState{0, 3}));
  ++pass;
  CHECK((*pass)[0][0].item<double>() == 3);
}

TEST_CASE("a loop that another one over its loader has ended is told so", "[loader]") {
  MirroredStrategy strategy;
  auto loader = strategy.prepare_loader(RefilledNumbers(), {.batch_size = 2});
  auto outer = loader.begin();
  SECTION("while the other one runs") {
    const auto inner = loader.begin();
    CHECK_THROWS_WITH(++outer, Catch::Contains("another loop over this loader has begun"));
  }
  SECTION("once it has ended") {
    CHECK(numbers_in(strategy, loader).size() == 5);
    CHECK_THROWS_AS(++outer, InvalidArgument);
  }
  outer = loader.begin();
  ++outer;
  CHECK((*outer)[0][0].item<double>() == 1);
}

TEST_CASE("a step's function may take its part by reference", "[loader]") {
  MirroredStrategy strategy;
  const auto model = model_of(strategy);
  CHECK(strategy.step([&](auto& part) { return model->forward(part).mean(); }, at::ones({2, 1})).step == 1);
}
