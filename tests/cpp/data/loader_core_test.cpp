// Loaders over torch::data data sets, on the replicas of one process.
#include "muster/loader.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <torch/data/datasets/map.h>
#include <torch/data/datasets/stateful.h>
#include <torch/data/transforms/stack.h>
#include <torch/nn/modules/linear.h>

#include <chrono>
#include <numeric>
#include <set>
#include <thread>

#include "cpp/catch.h"
#include "data/loader_host.h"
#include "muster/error.h"
#include "muster/mirrored.h"

using namespace muster;

namespace {

using Example = torch::data::Example<>;

// Sample i is ({i, 2 i}, i).
struct FirstNumbers : torch::data::datasets::Dataset<FirstNumbers> {
  explicit FirstNumbers(size_t n) : n(n) {}
  Example get(size_t index) override {
    if (index == broken) throw std::out_of_range("sample " + std::to_string(index) + " is broken");
    const auto i = static_cast<double>(index);
    return {at::tensor({i, 2 * i}, at::kDouble), at::tensor(static_cast<int64_t>(index))};
  }
  std::optional<size_t> size() const override { return n; }

  size_t n;
  size_t broken = std::numeric_limits<size_t>::max();
};

auto stacked(size_t n) { return FirstNumbers(n).map(torch::data::transforms::Stack<>()); }

// 0, 1, ..., count - 1, in batches of tensors.
struct Counting : torch::data::datasets::StatefulDataset<Counting, at::Tensor> {
  explicit Counting(int64_t count) : count(count) {}
  std::optional<at::Tensor> get_batch(size_t n) override {
    if (next >= count) return std::nullopt;
    const int64_t first = next;
    next = std::min(count, next + static_cast<int64_t>(n));
    return at::arange(first, next);
  }
  void reset() override { next = 0; }
  std::optional<size_t> size() const override { return std::nullopt; }
  void save(torch::serialize::OutputArchive&) const override {}
  void load(torch::serialize::InputArchive&) override {}

  int64_t count;
  int64_t next = 0;
};

// Of batches that end at each multiple of 10.
struct Chunked : Counting {
  using Counting::Counting;
  std::optional<at::Tensor> get_batch(size_t n) override {
    return Counting::get_batch(std::min(n, static_cast<size_t>(10 - next % 10)));
  }
};

struct Unsized : torch::data::datasets::Dataset<Unsized> {
  Example get(size_t) override { return {}; }
  std::optional<size_t> size() const override { return std::nullopt; }
};

std::vector<std::string> cpus(int n) { return std::vector<std::string>(static_cast<size_t>(n), "cpu"); }

std::vector<int64_t> numbers(const at::Tensor& tensor) {
  const auto values = tensor.to(at::kLong).contiguous();
  return {values.const_data_ptr<int64_t>(), values.const_data_ptr<int64_t>() + values.numel()};
}

using Pass = std::vector<std::vector<std::vector<int64_t>>>;  // [batch][part][sample]

template <class Loader>
Pass pass_over(Loader& loader) {
  Pass pass;
  for (auto& batch : loader) {
    pass.emplace_back();
    for (size_t r = 0; r < batch.size(); ++r) {
      if constexpr (std::is_same_v<typename Loader::Batch, at::Tensor>) {
        pass.back().push_back(numbers(batch[r]));
      } else {
        pass.back().push_back(numbers(batch[r].target));
      }
      CHECK(batch.rows()[r] == static_cast<int64_t>(pass.back().back().size()));
    }
  }
  return pass;
}

std::vector<int64_t> flat(const Pass& pass) {
  std::vector<int64_t> samples;
  for (const auto& batch : pass) {
    for (const auto& part : batch) samples.insert(samples.end(), part.begin(), part.end());
  }
  return samples;
}

// Rank 0 of two workers that step together, of which rank 1 has died.
struct HostOfTheLastOne final : muster::detail::LoaderHost {
  struct Alone final : muster::detail::Members {
    std::vector<uint32_t> expected() override { return {0}; }
    server::Dealt deal(const server::PassId&, uint64_t, std::vector<uint64_t>) override { return {}; }
    void end_pass(const server::PassId&, uint64_t, std::vector<uint64_t>) override {}
  };

  muster::detail::LoaderJob job() const override {
    Topology topology{.num_workers = 2, .num_replicas = 2, .replicas_of_worker = {1, 1}, .devices = {c10::kCPU}};
    return {std::move(topology), muster::detail::Division::live_workers};
  }
  std::vector<double> capacities() const override { return {}; }
  uint64_t seed() const override { return 0; }
  int64_t steps() const noexcept override { return 0; }
  int add(const std::shared_ptr<muster::detail::LoaderProgress>&, std::shared_ptr<muster::detail::LoaderPlace>,
          const std::string&) override {
    return 0;
  }
  bool any_has_more(bool has_more) override { return has_more; }
  std::shared_ptr<muster::detail::DealtPass> deal(int, int64_t, int64_t) override { return nullptr; }
  std::shared_ptr<muster::detail::SharedPass> share(int loader, int64_t epoch,
                                                    muster::detail::SharedPass::NextBatch next_batch) override {
    if (is_unready) throw InvalidArgument("prepare() the optimizer first");
    const server::PassId id{static_cast<uint32_t>(loader), static_cast<uint64_t>(epoch)};
    return std::make_shared<muster::detail::SharedPass>(members, 0, id, std::move(next_batch), std::vector<int>{1, 1});
  }
  void leave_passes() override {}

  const std::shared_ptr<Alone> members = std::make_shared<Alone>();
  bool is_unready = false;
};

// A loader of that host over so many samples, and the samples of its first parts.
struct LastOnesLoader {
  explicit LastOnesLoader(size_t size, LoaderOptions options = {.batch_size = 4})
      : core(host, options, /*is_stream=*/false, size, [this](size_t, const muster::detail::ReadTask& task) {
          return std::make_shared<std::vector<size_t>>(task.parts.front());
        }) {}

  std::vector<size_t> take() { return *std::static_pointer_cast<std::vector<size_t>>(core.take()); }

  std::shared_ptr<HostOfTheLastOne> host = std::make_shared<HostOfTheLastOne>();
  muster::detail::LoaderCore core;
};

}  // namespace

TEST_CASE("a loader cuts global batches into contiguous parts, larger first", "[loader]") {
  MirroredStrategy strategy(cpus(2));
  auto loader = strategy.prepare_loader(stacked(14), {.batch_size = 8});
  CHECK(loader.size() == 2);
  CHECK(pass_over(loader) == Pass{{{0, 1, 2, 3}, {4, 5, 6, 7}}, {{8, 9, 10}, {11, 12, 13}}});
  CHECK(pass_over(loader) == Pass{{{0, 1, 2, 3}, {4, 5, 6, 7}}, {{8, 9, 10}, {11, 12, 13}}});

  MirroredStrategy four(cpus(4));
  auto uneven = four.prepare_loader(stacked(9), {.batch_size = 9});
  CHECK(pass_over(uneven) == Pass{{{0, 1, 2}, {3, 4}, {5, 6}, {7, 8}}});
}

TEST_CASE("an empty part keeps the structure with no rows", "[loader]") {
  MirroredStrategy strategy(cpus(3));
  auto loader = strategy.prepare_loader(stacked(8), {.batch_size = 6});
  CHECK(pass_over(loader) == Pass{{{0, 1}, {2, 3}, {4, 5}}, {{6}, {7}, {}}});
  for (auto& batch : loader) {
    CHECK(batch[2].data.dim() == 2);
    CHECK(batch[2].data.size(1) == 2);
    CHECK(batch[2].data.scalar_type() == at::kDouble);
    CHECK(batch[2].target.scalar_type() == at::kLong);
  }
}

TEST_CASE("drop_last leaves out a short batch", "[loader]") {
  MirroredStrategy strategy(cpus(2));
  auto loader = strategy.prepare_loader(stacked(14), {.batch_size = 8, .drop_last = true});
  CHECK(loader.size() == 1);
  CHECK(pass_over(loader).size() == 1);
  auto stream = strategy.prepare_loader(Counting(14), {.batch_size = 8, .drop_last = true});
  CHECK(pass_over(stream).size() == 1);
  auto chunked = strategy.prepare_loader(Chunked(24), {.batch_size = 4, .drop_last = true});
  auto found = flat(pass_over(chunked));
  std::sort(found.begin(), found.end());
  CHECK(found == std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15, 16, 17, 20, 21, 22, 23});
}

TEST_CASE("shuffle has the order of Python's loader and changes by epoch", "[loader]") {
  MirroredStrategy strategy(cpus(2), {.seed = 7});
  auto first = strategy.prepare_loader(stacked(10), {.batch_size = 4, .shuffle = true});
  auto second = strategy.prepare_loader(stacked(10), {.batch_size = 4, .shuffle = true});
  // list(torch.utils.data.RandomSampler(range(10))) under AgreedStream(epoch_seed(7, loader, epoch)) of muster.streams
  const std::vector<int64_t> epoch0 = {1, 5, 9, 0, 3, 6, 4, 7, 2, 8};
  const std::vector<int64_t> epoch1 = {4, 6, 8, 2, 0, 3, 1, 7, 9, 5};
  const std::vector<int64_t> other = {1, 8, 0, 3, 7, 2, 4, 5, 6, 9};
  CHECK(flat(pass_over(first)) == epoch0);
  CHECK(first.epoch() == 1);
  CHECK(flat(pass_over(first)) == epoch1);
  CHECK(flat(pass_over(second)) == other);

  first.set_epoch(0);
  CHECK(flat(pass_over(first)) == epoch0);
  first.set_epoch(0);
  for ([[maybe_unused]] auto& batch : first) break;
  CHECK(first.epoch() == 0);
  CHECK(flat(pass_over(first)) == epoch1);
  CHECK_THROWS_AS(first.set_epoch(-1), InvalidArgument);
}

TEST_CASE("threads that read ahead change nothing that is yielded", "[loader]") {
  MirroredStrategy strategy(cpus(2));
  auto plain = strategy.prepare_loader(stacked(101), {.batch_size = 4});
  auto expected = pass_over(plain);
  for (int workers : {1, 3}) {
    auto loader = strategy.prepare_loader(stacked(101), {.batch_size = 4, .workers = workers});
    CHECK(pass_over(loader) == expected);
    for ([[maybe_unused]] auto& batch : loader) break;
    CHECK(pass_over(loader) == expected);
  }
  auto stream = strategy.prepare_loader(Counting(101), {.batch_size = 4, .workers = 1});
  CHECK(flat(pass_over(stream)).size() == 101);
}

TEST_CASE("an error in reading is raised where the batch is asked for", "[loader]") {
  MirroredStrategy strategy(cpus(2));
  FirstNumbers data(12);
  data.broken = 9;
  for (int workers : {0, 2}) {
    auto loader =
        strategy.prepare_loader(data.map(torch::data::transforms::Stack<>()), {.batch_size = 4, .workers = workers});
    int batches = 0;
    const auto read_all = [&] {
      for ([[maybe_unused]] auto& batch : loader) ++batches;
    };
    CHECK_THROWS_AS(read_all(), std::out_of_range);
    CHECK(batches == 2);
  }
}

TEST_CASE("who passes over an error in reading gets what comes after it", "[loader]") {
  MirroredStrategy strategy(cpus(1));
  FirstNumbers data(16);
  data.broken = 9;
  for (int workers : {0, 2}) {
    auto loader =
        strategy.prepare_loader(data.map(torch::data::transforms::Stack<>()), {.batch_size = 4, .workers = workers});
    auto batch = loader.begin();
    CHECK_THROWS_AS(std::advance(batch, 2), std::out_of_range);
    CHECK(loader.state().batches == 3);
    ++batch;
    CHECK(numbers((*batch)[0].target) == std::vector<int64_t>{12, 13, 14, 15});
    ++batch;
    CHECK(batch == loader.end());
    CHECK(loader.epoch() == 1);
  }
}

TEST_CASE("a stream is dealt sample by sample while parts are equal", "[loader]") {
  MirroredStrategy strategy(cpus(3), {}, GENERATE(Balance::equal, Balance::automatic));
  auto loader = strategy.prepare_loader(Counting(10), {.batch_size = 8});
  CHECK_FALSE(loader.size().has_value());
  CHECK(pass_over(loader) == Pass{{{0, 3, 6}, {1, 4, 7}, {2, 5}}, {{8}, {9}, {}}});
  CHECK(pass_over(loader).size() == 2);
}

TEST_CASE("samples that are not collated are parts of their own", "[loader]") {
  MirroredStrategy strategy(cpus(2));
  auto loader = strategy.prepare_loader(FirstNumbers(5), {.batch_size = 5, .sharded = true});
  for (auto& batch : loader) {
    CHECK(batch.rows() == std::vector<int64_t>{3, 2});
    CHECK(batch[1][0].target.item<int64_t>() == 3);
  }
}

TEST_CASE("with balance, parts follow the replicas' speeds and every sample is dealt once, in order", "[loader]") {
  const int workers = GENERATE(0, 2);
  MirroredStrategy strategy(cpus(2), {}, Balance::automatic);
  auto model = strategy.prepare([] { return torch::nn::Linear(2, 1); });
  model->to(at::kDouble);
  auto loader = strategy.prepare_loader(stacked(150), {.batch_size = 16, .workers = workers});
  std::vector<int64_t> everything(150);
  std::iota(everything.begin(), everything.end(), 0);
  std::vector<int64_t> last_full;
  for (int epoch = 0; epoch < 3; ++epoch) {
    Pass pass;
    for (auto& batch : loader) {
      pass.push_back({numbers(batch[0].target), numbers(batch[1].target)});
      const auto rows = batch.rows();
      CHECK(rows[0] == static_cast<int64_t>(pass.back()[0].size()));
      CHECK(rows[1] == static_cast<int64_t>(pass.back()[1].size()));
      if (pass.size() == 1 && epoch == 0) CHECK(rows == std::vector<int64_t>{8, 8});
      if (rows[0] + rows[1] == 16) last_full = rows;
      strategy.step(
          [&](const Example& part) {
            const auto per_row = std::chrono::microseconds(strategy.replica() == 0 ? 100 : 1000);
            std::this_thread::sleep_for(per_row * part.data.size(0));
            return model->forward(part.data).mean();
          },
          batch);
    }
    CHECK(flat(pass) == everything);
  }
  CHECK(last_full[0] >= 12);
  CHECK_THAT(strategy.explain(), ContainsSubstring("by capacity"));

  auto stream = strategy.prepare_loader(Counting(39), {.batch_size = 16, .workers = workers == 0 ? 0 : 1});
  const auto streamed = pass_over(stream);
  CHECK(flat(streamed) == std::vector<int64_t>(everything.begin(), everything.begin() + 39));
  CHECK(streamed[0][0].size() >= 12);
}

TEST_CASE("options that cannot be honoured are refused", "[loader]") {
  MirroredStrategy strategy(cpus(2));
  CHECK_THROWS_AS(strategy.prepare_loader(stacked(4), {.batch_size = 0}), InvalidArgument);
  CHECK_THROWS_AS(strategy.prepare_loader(stacked(4), {.workers = -1}), InvalidArgument);
  CHECK_THROWS_WITH(strategy.prepare_loader(Unsized()), ContainsSubstring("size()"));
  CHECK_THROWS_WITH(strategy.prepare_loader(Counting(4), {.shuffle = true}), ContainsSubstring("shuffle"));
  CHECK_THROWS_WITH(strategy.prepare_loader(Counting(4), {.workers = 2}), ContainsSubstring("workers"));
}

TEST_CASE("a loader's last batch closes the window", "[loader]") {
  const bool drop = GENERATE(false, true);
  MirroredStrategy strategy(cpus(2), {.accumulate = 2, .drop_incomplete = drop});
  auto model = strategy.prepare([] { return torch::nn::Linear(2, 1); });
  model->to(at::kDouble);
  const auto loss = [&](const Example& part) { return model->forward(part.data).mean(); };
  auto loader = strategy.prepare_loader(stacked(9), {.batch_size = 3});
  auto evaluation = strategy.prepare_loader(stacked(2), {.batch_size = 2});
  std::vector<bool> stepped;
  for (auto& batch : loader) {
    for (auto& other : evaluation) {
      strategy.run(loss, other);  // a loader that only run sees closes no window
      stepped.push_back(strategy.step(loss, batch).stepped);
      break;
    }
  }
  CHECK(stepped == std::vector<bool>{false, true, !drop});
  CHECK_FALSE(strategy.flush().has_value());
}

TEST_CASE("a last batch closes the window at the last of its steps", "[loader]") {
  MirroredStrategy strategy(cpus(2), {.accumulate = 2});
  auto model = strategy.prepare([] { return torch::nn::Linear(2, 1); });
  model->to(at::kDouble);
  const auto loss = [&](const Example& part) { return model->forward(part.data).mean(); };
  const auto of_own = [&](const at::Tensor& part) { return model->forward(part).mean(); };
  auto loader = strategy.prepare_loader(stacked(9), {.batch_size = 3});
  auto left = strategy.prepare_loader(stacked(2), {.batch_size = 2});
  for ([[maybe_unused]] auto& batch : left) break;
  const auto own = at::ones({4, 2}, at::kDouble);
  std::vector<bool> stepped;
  for (auto& batch : loader) {
    stepped.push_back(strategy.step(loss, batch).stepped);
    stepped.push_back(strategy.step(of_own, own).stepped);
  }
  CHECK(stepped == std::vector<bool>{false, true, false, true, false, true});
}

TEST_CASE("a batch that was fetched ahead closes the window where it is the last", "[loader]") {
  MirroredStrategy strategy(cpus(2), {.accumulate = 2});
  auto model = strategy.prepare([] { return torch::nn::Linear(2, 1); });
  model->to(at::kDouble);
  const auto loss = [&](const Example& part) { return model->forward(part.data).mean(); };
  auto loader = strategy.prepare_loader(stacked(15), {.batch_size = 3});
  for (int epoch = 0; epoch < 2; ++epoch) {
    std::vector<bool> stepped;
    auto next = loader.begin();
    while (next != loader.end()) {
      const auto batch = *next;
      ++next;
      stepped.push_back(strategy.step(loss, batch).stepped);
    }
    CHECK(stepped == std::vector<bool>{false, true, false, true, true});
  }
}

TEST_CASE("loading ends the loop that is under way", "[loader]") {
  MirroredStrategy strategy(cpus(2));
  auto loader = strategy.prepare_loader(stacked(12), {.batch_size = 3, .workers = GENERATE(0, 1)});
  std::vector<std::vector<int64_t>> seen;
  const auto loop = [&] {
    for (auto& batch : loader) {
      seen.push_back(numbers(batch[0].target));
      if (seen.size() == 3) loader.load_state({0, 1});
    }
  };
  CHECK_THROWS_WITH(loop(), ContainsSubstring("begin a new loop"));
  CHECK(seen.size() == 3);
  loop();
  CHECK(seen == std::vector<std::vector<int64_t>>{{0, 1}, {3, 4}, {6, 7}, {3, 4}, {6, 7}, {9, 10}});
  CHECK(loader.state().epoch == 1);
}

TEST_CASE("a loop over shared batches goes on as it was where the next epoch is set in it", "[loader]") {
  LastOnesLoader loader(12, {.batch_size = 4, .workers = GENERATE(0, 1)});
  const auto hold = loader.core.begin();
  size_t next = 0;
  while (loader.core.advance(hold)) {
    CHECK(loader.take() == std::vector<size_t>{next, next + 1, next + 2, next + 3});
    next += 4;
    loader.core.set_epoch(7);
  }
  CHECK(next == 12);
  CHECK(loader.core.epoch() == 7);
}

TEST_CASE("a pass that could not begin is the one that begins next", "[loader]") {
  LastOnesLoader loader(12);
  loader.core.load_state({2, 1});
  loader.host->is_unready = true;
  CHECK_THROWS_AS(loader.core.begin(), InvalidArgument);
  CHECK(loader.core.state() == LoaderState{2, 1});
  loader.host->is_unready = false;
  const auto hold = loader.core.begin();
  CHECK(loader.core.epoch() == 2);
  REQUIRE(loader.core.advance(hold));
  CHECK(loader.take().front() == 4);

  MirroredStrategy strategy(cpus(1));
  struct Failing : Counting {
    using Counting::Counting;
    std::optional<at::Tensor> get_batch(size_t n) override {
      if (next == 2 && std::exchange(fails, false)) throw std::runtime_error("the stream broke off");
      return Counting::get_batch(n);
    }
    bool fails = true;
  };
  auto stream = strategy.prepare_loader(Failing(6), {.batch_size = 2});
  stream.load_state({3, 2});
  CHECK_THROWS_WITH(stream.begin(), ContainsSubstring("broke off"));
  CHECK(flat(pass_over(stream)) == std::vector<int64_t>{4, 5});
  CHECK(stream.epoch() == 4);
}

TEST_CASE("a batch may be larger than any data", "[loader]") {
  MirroredStrategy strategy(cpus(2));
  constexpr auto kLargest = std::numeric_limits<int64_t>::max();
  auto loader = strategy.prepare_loader(stacked(5), {.batch_size = kLargest});
  CHECK(pass_over(loader) == Pass{{{0, 1, 2}, {3, 4}}});
}
