// Loaders of workers of parameter servers: of those that step on their own, to whom servers deal whole batches, and of
// those that step together, who divide them. Workers are threads.
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <torch/data/datasets/base.h>
#include <torch/data/datasets/stateful.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <thread>

#include "core/wait_hook.h"
#include "cpp/catch.h"
#include "muster/error.h"
#include "muster/loader.h"
#include "muster/optim.h"
#include "muster/parameter_server.h"
#include "strategy/sharing.h"
#include "strategy/strategy_core.h"
#include "support/run_ranks.h"
#include "support/servers.h"
#include "support/topology.h"

using namespace muster;
using namespace muster::testing;
using muster::detail::PassStanding;
using muster::detail::SharedPiece;
using muster::detail::Sharing;

namespace {

constexpr size_t kSamples = 50;
constexpr LoaderOptions kLoading{.batch_size = 4, .shuffle = true};  // 13 batches

// Sample i is (i, i).
struct Numbers : torch::data::datasets::BatchDataset<Numbers, at::Tensor> {
  explicit Numbers(size_t n = kSamples) : n(n) {}
  at::Tensor get_batch(c10::ArrayRef<size_t> indices) override {
    std::vector<float> values;
    for (const size_t index : indices) {
      if (index == broken) throw std::out_of_range("sample " + std::to_string(index) + " is broken");
      values.insert(values.end(), 2, static_cast<float>(index));
    }
    return at::tensor(values).view({-1, 2});
  }
  std::optional<size_t> size() const override { return n; }

  size_t n;
  size_t broken = kSamples;
};

struct Counting : torch::data::datasets::StatefulDataset<Counting, at::Tensor> {
  std::optional<at::Tensor> get_batch(size_t) override { return std::nullopt; }
  void reset() override {}
  std::optional<size_t> size() const override { return std::nullopt; }
  void save(torch::serialize::OutputArchive&) const override {}
  void load(torch::serialize::InputArchive&) override {}
};

using Samples = std::vector<int64_t>;

Samples samples_of(const at::Tensor& batch) {
  const auto column = batch.select(1, 0).to(at::kLong).contiguous();
  return {column.const_data_ptr<int64_t>(), column.const_data_ptr<int64_t>() + column.numel()};
}

// A strategy with a model that is ready to step.
class Learner : public Strategy {
 public:
  explicit Learner(std::shared_ptr<StrategyCore> core)
      : Strategy(std::move(core), "Learner"),
        model(prepare([] { return torch::nn::Linear(2, 1); })),
        optimizer(model->parameters(), torch::optim::SGDOptions(1e-6)) {
    prepare(optimizer);
  }

  StepResult learn(const PerReplica<at::Tensor>& batch) {
    return step([&](const at::Tensor& x) { return model->forward(x).mean(); }, batch);
  }

  Replicated<torch::nn::LinearImpl> model;
  optim::SGD optimizer;
};

// Workers, and servers of their own.
class Job {
 public:
  Job(int workers, const StrategyOptions& options, uint32_t staleness)
      : options_(options),
        staleness_(staleness),
        step_(comm::make_local(workers, timeout())),
        workers_(comm::make_local(workers, timeout())) {}

  std::shared_ptr<StrategyCore> core(int rank, bool joins = false) const {
    const auto r = static_cast<size_t>(rank);
    const int n = static_cast<int>(workers_.size());
    Groups groups;
    groups.gradients = {comm::make_single()};
    groups.step = {step_[r]};
    groups.workers = workers_[r];
    if (joins) {
      groups.workers = comm::make_refusing(rank, n, "this worker joined");
      groups.step = {groups.workers};
      groups.prepare = comm::make_single();
    }
    groups.servers =
        ServerJob{.channels = servers_.names, .joins = joins, .staleness = staleness_, .embedded = nullptr};
    return std::make_shared<StrategyCore>(one_replica_each(rank, n), groups, options_,
                                          std::make_shared<ReplicaPool>(1, 1), 7);
  }

 private:
  comm::Milliseconds timeout() const { return comm::Milliseconds(static_cast<int64_t>(options_.timeout * 1000)); }

  const Servers servers_{server_names(2)};
  const StrategyOptions options_;
  const uint32_t staleness_;
  const std::vector<comm::CommunicatorPtr> step_;
  const std::vector<comm::CommunicatorPtr> workers_;
};

std::string on_workers(int n, const StrategyOptions& options, const std::function<void(Learner&)>& body,
                       uint32_t staleness = server::kAnyStaleness) {
  const Job job(n, options, staleness);
  return run_threads(n, [&](int rank) {
    Learner worker(job.core(rank));
    body(worker);
  });
}

StrategyOptions patient(double timeout) {
  StrategyOptions options;
  options.timeout = timeout;
  return options;
}

Samples everything() {
  Samples samples(kSamples);
  std::iota(samples.begin(), samples.end(), 0);
  return samples;
}

Samples sorted(Samples samples) {
  std::sort(samples.begin(), samples.end());
  return samples;
}

void append(Samples& to, const Samples& samples) { to.insert(to.end(), samples.begin(), samples.end()); }

// Something that happens once, and others wait for.
class Event {
 public:
  void happened() {
    if (!is_set_.exchange(true)) promise_.set_value();
  }
  void wait() const { MUSTER_CHECK(future_.wait_for(Seconds(60)) == std::future_status::ready); }

 private:
  std::atomic<bool> is_set_{false};
  std::promise<void> promise_;
  std::shared_future<void> future_{promise_.get_future()};
};

}  // namespace

TEST_CASE("servers deal each batch of an epoch to one C++ worker", "[loader][server]") {
  constexpr size_t kEpochs = 3;
  const int readers = GENERATE(0, 2);
  auto loading = kLoading;
  loading.workers = readers;
  std::vector<std::vector<Samples>> seen(2, std::vector<Samples>(kEpochs));  // [rank][epoch]
  std::vector<int> batches(2);
  Event slow_has_one;
  CHECK(on_workers(2, patient(60), [&](Learner& worker) {
          const auto rank = static_cast<size_t>(worker.rank());
          auto loader = worker.prepare_loader(Numbers(), loading);
          MUSTER_CHECK(loader.size() == 13);
          for (size_t epoch = 0; epoch < kEpochs; ++epoch) {
            MUSTER_CHECK(loader.epoch() == static_cast<int64_t>(epoch));
            for (auto& batch : loader) {
              MUSTER_CHECK(batch.size() == 1);
              if (rank == 0) slow_has_one.wait();
              if (rank == 1) {
                slow_has_one.happened();
                std::this_thread::sleep_for(std::chrono::milliseconds(30));
              }
              MUSTER_CHECK(worker.learn(batch).stepped);
              append(seen[rank][epoch], samples_of(batch[0]));
              ++batches[rank];
            }
          }
          worker.barrier();
        }) == "");
  for (size_t epoch = 0; epoch < kEpochs; ++epoch) {
    auto both = seen[0][epoch];
    append(both, seen[1][epoch]);
    CHECK(sorted(both) == everything());
  }
  CHECK(batches[0] + batches[1] == 39);
  CHECK(batches[0] > batches[1]);
  CHECK(batches[1] > 0);
  CHECK(seen[0][0] != seen[0][1]);  // shuffled anew
}

TEST_CASE("what a C++ worker leaves undone of shared batches goes to those who live", "[loader][server]") {
  constexpr int kEpochs = 2;
  auto loading = kLoading;
  loading.batch_size = 7;  // 8 batches, of which the last has one sample
  loading.workers = GENERATE(0, 2);
  auto options = patient(60);
  options.accumulate = GENERATE(1, 2);
  const int last_step = GENERATE(1, 3, 7, 8, 12);  // of the worker that leaves, in the middle of a window or at its end
  CAPTURE(loading.workers, options.accumulate, last_step);
  std::vector<Samples> learnt(3);  // by rank
  std::vector<int> batches(3);
  const auto body = [&](Learner& worker) {
    const auto rank = static_cast<size_t>(worker.rank());
    auto loader = worker.prepare_loader(Numbers(), loading);
    Samples in_window;
    for (int epoch = 0; epoch < kEpochs; ++epoch) {
      for (auto& batch : loader) {
        if (rank == 2 && batches[rank] == last_step) return;
        append(in_window, samples_of(batch[0]));
        ++batches[rank];
        if (worker.learn(batch).stepped) append(learnt[rank], std::exchange(in_window, {}));
      }
    }
  };
  CHECK(on_workers(3, options, body, /*staleness=*/0) == "");
  auto all = learnt[0];
  append(all, learnt[1]);
  append(all, learnt[2]);
  auto expected = everything();
  append(expected, everything());
  CHECK(sorted(all) == sorted(expected));
  CHECK(batches[2] == last_step);
  CHECK(batches[0] == batches[1]);
  CHECK(batches[0] >= kEpochs * 8);
}

TEST_CASE("a C++ worker that joins others goes on where their loaders are", "[loader][server]") {
  constexpr int kEpochs = 3;
  auto loading = kLoading;
  loading.workers = GENERATE(0, 2);
  CAPTURE(loading.workers);
  std::vector<Samples> learnt(3);  // by rank
  int joined = 0;
  const auto learn = [&](Learner& worker, int last_step) {
    const auto rank = static_cast<size_t>(worker.rank());
    auto loader = worker.prepare_loader(Numbers(), loading);
    int steps = 0;
    while (loader.epoch() < kEpochs) {
      for (auto& batch : loader) {
        if (steps++ == last_step) return steps;
        if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(30));
        MUSTER_CHECK(worker.learn(batch).stepped);
        append(learnt[rank], samples_of(batch[0]));
      }
    }
    return steps;
  };
  const Job job(3, patient(60), /*staleness=*/0);
  CHECK(run_threads(3, [&](int rank) {
          {
            Learner worker(job.core(rank));
            learn(worker, rank == 2 ? 3 : 1000);
          }
          if (rank != 2) return;
          Learner again(job.core(rank, /*joins=*/true));
          joined = learn(again, 1000);
        }) == "");
  auto all = learnt[0];
  append(all, learnt[1]);
  append(all, learnt[2]);
  Samples expected;
  for (int epoch = 0; epoch < kEpochs; ++epoch) append(expected, everything());
  CHECK(sorted(all) == sorted(expected));
  CHECK(joined > 13);
  CHECK(joined < 39);
}

TEST_CASE("a C++ worker that joins others of more data says so", "[loader][server]") {
  const Job job(1, patient(20), /*staleness=*/0);
  Sharing pass(job.core(0), /*loader=*/0, /*epoch=*/0, {0, 1, 2}, /*batch_size=*/1, /*batches=*/3);
  PassStanding others{.taken = 1, .again = {{1, 3}}};
  pass.go_on(others, {0});
  CHECK(pass.next().has_value());
  for (auto* pieces : {&others.again, &others.asked, &others.open}) {
    for (const auto& wrong : std::vector<SharedPiece>{{2, 4}, {-1, 1}, {2, 1}}) {
      pieces->push_back(wrong);
      CHECK_THROWS_AS(pass.go_on(others, {0}), InvalidArgument);
      pieces->pop_back();
    }
  }
}

TEST_CASE("a pass that a C++ worker leaves early goes to the others", "[loader][server]") {
  enum class Then { step, run, collective, another_pass, close };
  const auto then = GENERATE(Then::step, Then::run, Then::collective, Then::another_pass, Then::close);
  CAPTURE(static_cast<int>(then));
  const bool drops_loader = then == Then::step;
  std::vector<Samples> seen(2);
  Event first_left;
  Event other_is_through;
  CHECK(on_workers(2, patient(20), [&](Learner& worker) {
          auto loading = kLoading;
          loading.workers = worker.rank() == 0 ? 1 : 0;
          auto loader = std::make_optional(worker.prepare_loader(Numbers(), loading));
          if (worker.rank() == 1) {
            first_left.wait();
            for (auto& batch : *loader) {
              worker.learn(batch);
              append(seen[1], samples_of(batch[0]));
            }
            other_is_through.happened();
            if (then == Then::collective) worker.barrier();
            return;
          }
          auto batches = loader->begin();
          worker.learn(*batches);
          append(seen[0], samples_of((*batches)[0]));
          if (then != Then::another_pass) batches = {};
          if (drops_loader) loader.reset();
          first_left.happened();
          const PerReplica<at::Tensor> own({at::ones({2, 2})});
          switch (then) {
            case Then::step:
              worker.learn(own);
              break;
            case Then::run:
              worker.run([](const at::Tensor&) {}, own);
              break;
            case Then::collective:
              worker.barrier();
              break;
            case Then::another_pass: {
              Samples whole;
              for (auto& batch : *loader) append(whole, samples_of(batch[0]));
              MUSTER_CHECK(sorted(whole) == everything());
              break;
            }
            case Then::close:
              worker.close();
              break;
          }
          other_is_through.wait();
        }) == "");
  CHECK(seen[0].size() == 4);
  append(seen[0], seen[1]);
  CHECK(sorted(seen[0]) == everything());
}

TEST_CASE("a C++ worker at the end of its share waits for what others may leave", "[loader][server]") {
  Samples waited;
  Samples held;
  Event other_holds;
  Event first_waits;
  CHECK(on_workers(2, patient(60), [&](Learner& worker) {
          auto loader = worker.prepare_loader(Numbers(), kLoading);
          if (worker.rank() == 1) {
            auto batches = loader.begin();
            other_holds.happened();
            first_waits.wait();
            append(held, samples_of((*batches)[0]));
            batches = {};
            worker.run([](const at::Tensor&) {}, PerReplica<at::Tensor>({at::ones({2, 2})}));
            return;
          }
          bool is_asking = false;
          const WaitHook hook([&] {
            if (is_asking && waited.size() >= kSamples - 8) first_waits.happened();
          });
          for (auto& batch : loader) {
            is_asking = false;
            other_holds.wait();
            worker.learn(batch);
            append(waited, samples_of(batch[0]));
            is_asking = true;
          }
        }) == "");
  CHECK(held.size() >= 2);
  append(waited, held);
  CHECK(sorted(waited) == everything());
}

TEST_CASE("a C++ worker's wait for the batches of others ends in time, and by its hook", "[loader][server]") {
  const bool is_interrupted = GENERATE(false, true);
  Event other_holds;
  Event first_is_through;
  CHECK(on_workers(2, patient(is_interrupted ? 60 : 2), [&](Learner& worker) {
          auto loader = worker.prepare_loader(Numbers(), kLoading);
          if (worker.rank() == 1) {
            const auto batches = loader.begin();
            other_holds.happened();
            first_is_through.wait();
            return;
          }
          bool is_through = false;
          const WaitHook hook([&] {
            if (is_interrupted && is_through) throw std::runtime_error("interrupted");
          });
          size_t samples = 0;
          const auto pass = [&] {
            for (auto& batch : loader) {
              other_holds.wait();
              samples += static_cast<size_t>(batch.rows()[0]);
              is_through = samples >= kSamples - 8;
            }
          };
          if (is_interrupted) {
            MUSTER_CHECK(message_of<std::runtime_error>(pass) == "interrupted");
          } else {
            MUSTER_CHECK(contains(message_of<Timeout>(pass), "other workers"));
          }
          first_is_through.happened();
        }) == "");
}

TEST_CASE("a pass over dealt batches ends whatever becomes of its steps", "[loader][server]") {
  auto options = patient(10);
  SECTION("a step that fails has its batch all the same") {
    CHECK(on_workers(1, options, [&](Learner& worker) {
            auto loader = worker.prepare_loader(Numbers(), kLoading);
            int failed = 0;
            for (auto& batch : loader) {
              const auto fail = [&](const at::Tensor&) -> at::Tensor { throw std::runtime_error("no"); };
              message_of<std::runtime_error>([&] { worker.step(fail, batch); });
              ++failed;
            }
            MUSTER_CHECK(failed == 13);
            MUSTER_CHECK(loader.epoch() == 1);
          }) == "");
  }
  SECTION("windows of several batches, the last dropped or run only") {
    options.accumulate = 2;
    options.drop_incomplete = GENERATE(false, true);
    CHECK(on_workers(1, options, [&](Learner& worker) {
            auto loader = worker.prepare_loader(Numbers(), kLoading);
            int steps = 0;
            int number = 0;
            for (auto& batch : loader) {
              if (++number <= 11 || options.drop_incomplete) {
                steps += worker.learn(batch).stepped ? 1 : 0;
              } else {
                worker.run([](const at::Tensor&) {}, batch);
              }
            }
            MUSTER_CHECK(steps == (options.drop_incomplete ? 6 : 5));
            for (auto& batch : loader) worker.run([](const at::Tensor&) {}, batch);
            MUSTER_CHECK(loader.epoch() == 2);
          }) == "");
  }
  SECTION("a batch that cannot be read is nobody's, and the others go on") {
    Samples seen;
    Event first_failed;
    CHECK(on_workers(2, options, [&](Learner& worker) {
            Numbers data;
            if (worker.rank() == 0) data.broken = 0;
            auto loader = worker.prepare_loader(std::move(data), {.batch_size = 4});
            if (worker.rank() == 0) {
              MUSTER_CHECK(contains(message_of<std::out_of_range>([&] { loader.begin(); }), "broken"));
              worker.run([](const at::Tensor&) {}, PerReplica<at::Tensor>({at::ones({2, 2})}));
              first_failed.happened();
              return;
            }
            first_failed.wait();
            for (auto& batch : loader) append(seen, samples_of(batch[0]));
          }) == "");
    auto expected = everything();
    expected.erase(expected.begin(), expected.begin() + 4);
    CHECK(seen == expected);
  }
}

TEST_CASE("sharded loaders of C++ workers that step on their own do not wait for one another", "[loader][server]") {
  Event first_is_through;
  CHECK(on_workers(2, patient(60), [&](Learner& worker) {
          auto loader = worker.prepare_loader(Numbers(worker.rank() == 0 ? 20 : 4), {.batch_size = 4, .sharded = true});
          if (worker.rank() == 1) first_is_through.wait();
          int steps = 0;
          for (auto& batch : loader) {
            worker.learn(batch);
            ++steps;
          }
          MUSTER_CHECK(steps == (worker.rank() == 0 ? 5 : 1));
          first_is_through.happened();
        }) == "");
}

TEST_CASE("what cannot be dealt is refused", "[loader][server]") {
  StrategyOptions options;
  options.threads_per_replica = 1;
  ParameterServerStrategy strategy(Cluster{}, {.staleness = 1}, options);
  CHECK_THROWS_WITH(strategy.prepare_loader(Counting()), ContainsSubstring("by number"));
  CHECK_NOTHROW(strategy.prepare_loader(Counting(), {.sharded = true}));

  auto loader = strategy.prepare_loader(Numbers(), kLoading);
  CHECK_THROWS_AS(loader.begin(), InvalidArgument);
  auto model = strategy.prepare([] { return torch::nn::Linear(2, 1); });
  CHECK_THROWS_WITH(loader.begin(), ContainsSubstring("prepare()"));
  optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  strategy.prepare(optimizer);
  int batches = 0;
  for ([[maybe_unused]] auto& batch : loader) ++batches;
  CHECK(batches == 13);
  CHECK(loader.epoch() == 1);
  strategy.close();
  CHECK_THROWS_AS(loader.begin(), InvalidArgument);
}
