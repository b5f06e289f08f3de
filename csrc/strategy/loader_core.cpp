#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

#include "core/replica_context.h"
#include "muster/error.h"
#include "muster/loader.h"
#include "strategy/strategy_state.h"

namespace muster::detail {

namespace {

constexpr uint64_t kLoaders = 0x6C6F61646572;  // "loader": keeps loaders' streams apart from replicas'
constexpr int64_t kReadsPerThread = 2;         // how far ahead of the loop readers go

// Reads numbered batches, in order, ahead of the loop where there are threads. Owned by the thread that iterates.
class ReadAhead {
 public:
  using Read = std::function<std::shared_ptr<void>(size_t thread, int64_t number)>;

  ReadAhead(size_t threads, int64_t count, Read read) : count_(count), read_(std::move(read)) {
    window_ = static_cast<int64_t>(threads) * kReadsPerThread;
    for (size_t thread = 0; thread < threads; ++thread) threads_.emplace_back([this, thread] { serve(thread); });
  }

  ~ReadAhead() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    space_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  ReadAhead(const ReadAhead&) = delete;
  ReadAhead& operator=(const ReadAhead&) = delete;

  // The next batch; null at the end. Throws what reading it threw.
  std::shared_ptr<void> take() {
    std::unique_lock lock(mutex_);
    if (taken_ >= count_) return nullptr;
    if (threads_.empty()) {
      auto batch = read_(0, taken_++);
      if (!batch) count_ = taken_;
      return batch;
    }
    ready_.wait(lock, [&] { return results_.contains(taken_); });
    auto result = std::move(results_.extract(taken_++).mapped());
    lock.unlock();
    space_.notify_one();
    if (result.error) std::rethrow_exception(result.error);
    return result.batch;
  }

 private:
  struct Result {
    std::shared_ptr<void> batch;
    std::exception_ptr error;
  };

  void serve(size_t thread) {
    at::set_num_threads(1);
    std::unique_lock lock(mutex_);
    for (;;) {
      space_.wait(lock, [&] { return stopping_ || claimed_ >= count_ || claimed_ < taken_ + window_; });
      if (stopping_ || claimed_ >= count_) return;
      const int64_t number = claimed_++;
      lock.unlock();
      Result result;
      try {
        result.batch = read_(thread, number);
      } catch (...) {
        result.error = std::current_exception();
      }
      lock.lock();
      if (!result.batch && !result.error) count_ = claimed_;
      results_[number] = std::move(result);
      ready_.notify_one();
    }
  }

  int64_t count_;  // guarded by mutex_, as are all below but threads_
  Read read_;      // constant
  int64_t window_;
  std::mutex mutex_;
  std::condition_variable space_;
  std::condition_variable ready_;
  std::map<int64_t, Result> results_;
  int64_t claimed_ = 0;
  int64_t taken_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

// None where all are equal, so that a stream is dealt as it is without balance.
std::vector<double> unequal(std::vector<double> capacities) {
  const bool are_equal =
      std::adjacent_find(capacities.begin(), capacities.end(), std::not_equal_to<>()) == capacities.end();
  return are_equal ? std::vector<double>{} : std::move(capacities);
}

// The order that Python's RandomSampler has when torch's default generator is seeded with the epoch's seed.
std::vector<size_t> shuffled(size_t n, uint64_t seed) {
  const auto sampler_seed = at::empty({}, at::kLong);
  sampler_seed.random_(at::detail::createCPUGenerator(seed));
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(sampler_seed.item<int64_t>()));
  const auto order = at::randperm(static_cast<int64_t>(n), generator, at::kLong);
  const auto* first = order.const_data_ptr<int64_t>();
  return {first, first + n};
}

}  // namespace

struct LoaderCore::State {
  std::shared_ptr<Strategy::State> strategy;
  LoaderOptions options;
  bool is_stream;
  size_t samples;
  Read read;
  Deal deal;
  int index;
  std::shared_ptr<LoaderProgress> progress;
  int64_t epoch = 0;
  bool running = false;  // a pass that counts as an epoch has begun and not ended
  bool ended = true;     // no worker has another batch
  std::shared_ptr<void> current;
  std::shared_ptr<void> ahead;
  std::exception_ptr ahead_error;
  bool more_ahead = false;
  std::unique_ptr<ReadAhead> reads;

  int64_t batches() const {
    if (is_stream) return std::numeric_limits<int64_t>::max();
    const auto n = static_cast<int64_t>(samples);
    return (options.drop_last ? n : n + options.batch_size - 1) / options.batch_size;
  }

  ReadTask task_of(const std::vector<size_t>& order, int64_t number) const {
    ReadTask task;
    task.first = number == 0;
    task.capacities = unequal(strategy->core->capacities());
    if (is_stream) return task;
    const auto start = order.begin() + number * options.batch_size;
    const int64_t n = std::min<int64_t>(options.batch_size, order.end() - start);
    const auto sizes = part_sizes(n, deal.parts, task.capacities);
    auto next = start + std::accumulate(sizes.begin(), sizes.begin() + deal.first, int64_t{0});
    for (int part = deal.first; part < deal.first + deal.local; ++part) {
      const auto size = sizes[static_cast<size_t>(part)];
      task.parts.emplace_back(next, next + size);
      if (size == 0) task.model = *start;
      next += size;
    }
    return task;
  }

  // Reads one batch ahead, and agrees with the other workers whether anybody has one.
  void look_ahead() {
    ahead = nullptr;
    ahead_error = nullptr;
    try {
      ahead = reads->take();
    } catch (...) {
      ahead_error = std::current_exception();
    }
    more_ahead = ahead != nullptr || ahead_error != nullptr;
    if (!options.sharded) return;
    const auto any = at::zeros({1}, at::kLong);
    any.data_ptr<int64_t>()[0] = more_ahead ? 1 : 0;
    strategy->core->workers().all_reduce(any, ReduceOp::max).wait();
    more_ahead = any.const_data_ptr<int64_t>()[0] != 0;
  }
};

LoaderCore::LoaderCore(Strategy& strategy, const LoaderOptions& options, bool is_stream, std::optional<size_t> size,
                       Read read)
    : state_(std::make_unique<State>()) {
  const auto require = [](bool holds, const std::string& problem) {
    if (!holds) throw InvalidArgument(problem);
  };
  require(options.batch_size >= 1, "batch_size=" + std::to_string(options.batch_size) + ": it must be at least 1");
  require(options.workers >= 0, "workers=" + std::to_string(options.workers) + ": it must be at least 0");
  require(is_stream || size.has_value(),
          "the data set does not know its size, and is read by index; give it a size(), "
          "or make it a torch::data::datasets::StatefulDataset");
  require(!is_stream || !options.shuffle,
          "shuffle=true: a stream cannot be shuffled; let the data set do it in reset(), "
          "alike on all ranks");
  require(!is_stream || options.workers <= 1,
          "workers=" + std::to_string(options.workers) + ": one thread reads a stream; pass workers=1 or 0");
  auto& s = *state_;
  s.strategy = strategy.state_;
  s.options = options;
  s.is_stream = is_stream;
  s.samples = size.value_or(0);
  s.read = std::move(read);
  const auto& topology = s.strategy->core->topology();
  s.deal = options.sharded ? Deal{topology.local_replicas(), 0, topology.local_replicas()}
                           : Deal{topology.num_replicas, topology.first_replica, topology.local_replicas()};
  s.index = s.strategy->num_loaders++;
  s.progress = std::make_shared<LoaderProgress>();
  auto& loaders = s.strategy->loaders;
  std::erase_if(loaders, [](const auto& loader) { return loader.expired(); });
  loaders.push_back(s.progress);
}

LoaderCore::~LoaderCore() = default;

const Deal& LoaderCore::deal() const noexcept { return state_->deal; }
const std::shared_ptr<LoaderProgress>& LoaderCore::progress() const noexcept { return state_->progress; }
int64_t LoaderCore::epoch() const noexcept { return state_->epoch; }

void LoaderCore::set_epoch(int64_t epoch) {
  if (epoch < 0) throw InvalidArgument("a loader's epoch counts from 0; " + std::to_string(epoch) + " is none");
  state_->epoch = epoch;
  state_->running = false;
}

std::optional<int64_t> LoaderCore::size() const noexcept {
  if (state_->is_stream) return std::nullopt;
  return state_->batches();
}

void LoaderCore::begin() {
  auto& s = *state_;
  s.reads.reset();
  s.progress->at_end = false;
  if (s.running) ++s.epoch;
  s.running = true;
  s.ended = false;
  std::vector<size_t> order;
  if (!s.is_stream && s.options.shuffle) {
    const auto seed = stream_seed(s.strategy->core->seed() ^ kLoaders, static_cast<uint64_t>(s.index),
                                  static_cast<uint64_t>(s.epoch));
    order = shuffled(s.samples, seed);
  } else if (!s.is_stream) {
    order.resize(s.samples);
    std::iota(order.begin(), order.end(), size_t{0});
  }
  s.reads = std::make_unique<ReadAhead>(static_cast<size_t>(s.options.workers), s.batches(),
                                        [&s, order = std::move(order)](size_t thread, int64_t number) {
                                          return s.read(thread, s.task_of(order, number));
                                        });
  s.look_ahead();
}

bool LoaderCore::advance() {
  auto& s = *state_;
  s.progress->at_end = false;
  s.current = nullptr;
  if (s.ended) return false;
  if (s.ahead_error) {
    s.ended = true;
    s.reads.reset();
    std::rethrow_exception(std::exchange(s.ahead_error, nullptr));
  }
  if (!s.more_ahead) {
    s.ended = true;
    s.reads.reset();
    if (s.running) ++s.epoch;
    s.running = false;
    return false;
  }
  s.current = std::move(s.ahead);
  s.look_ahead();
  s.progress->at_end = !s.more_ahead;
  return true;
}

std::shared_ptr<void> LoaderCore::take() { return std::exchange(state_->current, nullptr); }

}  // namespace muster::detail
