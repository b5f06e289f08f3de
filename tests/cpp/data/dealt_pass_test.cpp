// Batches that parameter servers deal: the pass by itself, and loaders of workers that step on their own.
#include "data/dealt_pass.h"

#include <ATen/ops/ones.h>
#include <torch/data/datasets/stateful.h>

#include <chrono>
#include <deque>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "core/wait_hook.h"
#include "cpp/catch.h"
#include "muster/error.h"
#include "support/learners.h"

using namespace muster;
using namespace muster::testing;
using muster::detail::DealtPass;
using muster::detail::WindowEnd;

namespace {

struct CountingPositions : torch::data::datasets::StatefulDataset<CountingPositions, at::Tensor> {
  std::optional<at::Tensor> get_batch(size_t) override { return std::nullopt; }
  void reset() override {}
  std::optional<size_t> size() const override { return std::nullopt; }
  void save(torch::serialize::OutputArchive&) const override {}
  void load(torch::serialize::InputArchive&) override {}
};

// Answers as it is told to, and notes what it was told.
struct ScriptedServer final : muster::detail::Members {
  std::vector<uint32_t> expected() override { return {0}; }
  server::Dealt deal(const server::PassId&, uint64_t, std::vector<uint64_t> now) override {
    finished.insert(finished.end(), now.begin(), now.end());
    const auto answer = answers.front();
    if (answers.size() > 1) answers.pop_front();
    return answer;
  }
  void end_pass(const server::PassId&, uint64_t, std::vector<uint64_t> now) override {
    finished.insert(finished.end(), now.begin(), now.end());
    ++passes_ended;
  }

  static constexpr auto kDealt = server::Dealt::State::dealt;
  std::deque<server::Dealt> answers{{kDealt, 4}, {kDealt, 5}, {kDealt, 7}, {server::Dealt::State::none}};
  std::vector<uint64_t> finished;
  int passes_ended = 0;
};

using Numbers64 = std::vector<uint64_t>;

}  // namespace

TEST_CASE("a dealt batch is finished by the step that it goes into, else when the loop is through with it", "[data]") {
  const auto server = std::make_shared<ScriptedServer>();
  DealtPass pass(server, {2, 3}, 10, 60);
  const auto get = [&] {
    const auto number = pass.next().value();
    pass.yielded(number);
    return number;
  };
  CHECK(get() == 4);
  CHECK(pass.begin_step() == server::BatchId{2, 3, 4});
  CHECK_FALSE(pass.begin_step());
  pass.end_step(WindowEnd::closed, {});
  pass.done();
  CHECK(get() == 5);
  CHECK(server->finished == Numbers64{});
  pass.done();
  CHECK(get() == 7);
  CHECK(server->finished == Numbers64{5});

  SECTION("a step that failed leaves its batch to the loop") {
    pass.begin_step();
    pass.end_step(WindowEnd::dropped, {});
    CHECK(pass.begin_step() == server::BatchId{2, 3, 7});
    pass.end_step(WindowEnd::dropped, {});
    pass.done();
    CHECK_FALSE(pass.next());
    CHECK(server->finished == Numbers64{5, 7});
  }
  SECTION("whoever leaves gives back what he has, once") {
    pass.leave();
    pass.leave();
    CHECK(server->finished == Numbers64{5, 7});
    CHECK(server->passes_ended == 1);
    CHECK(pass.has_ended());
    CHECK_FALSE(pass.next());
  }
  SECTION("at the end of a share, batches of an open window count as finished") {
    pass.begin_step();
    pass.end_step(WindowEnd::still_open, {});
    server->answers = {{server::Dealt::State::ended}};
    CHECK_FALSE(pass.wait_for_more());
    CHECK(server->finished == Numbers64{5, 7});
    CHECK(pass.has_ended());
  }
}

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
  CHECK_THROWS_WITH(strategy.prepare_loader(CountingPositions()), ContainsSubstring("by number"));
  CHECK_NOTHROW(strategy.prepare_loader(CountingPositions(), {.sharded = true}));

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
