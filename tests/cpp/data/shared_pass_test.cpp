// Batches that live workers divide: the pass by itself, and loaders of workers that step together.
#include "data/shared_pass.h"

#include <array>
#include <chrono>
#include <thread>
#include <utility>

#include "cpp/catch.h"
#include "muster/error.h"
#include "server/protocol/wire.h"
#include "support/learners.h"

using namespace muster;
using namespace muster::testing;
using muster::detail::PassStanding;
using muster::detail::PassStandings;
using muster::detail::SharedPass;
using muster::detail::SharedPiece;
using muster::detail::WindowEnd;

namespace {

// Ranks 0 and 1, until one is lost.
struct Two final : muster::detail::Members {
  std::vector<uint32_t> expected() override { return live; }
  server::Dealt deal(const server::PassId&, uint64_t, std::vector<uint64_t>) override { return {}; }
  void end_pass(const server::PassId&, uint64_t, std::vector<uint64_t>) override {}

  std::vector<uint32_t> live{0, 1};
};

SharedPass::NextBatch batches(std::vector<int64_t> sizes) {
  return [sizes = std::move(sizes), next = size_t{0}]() mutable -> std::optional<int64_t> {
    return next < sizes.size() ? std::optional(sizes[next++]) : std::nullopt;
  };
}

using Range = std::pair<int64_t, int64_t>;

// What the pass reads next, as positions; the loop gets it.
std::optional<Range> get(SharedPass& pass) {
  pass.done();
  const auto number = pass.next();
  if (!number) return std::nullopt;
  const auto part = pass.part_of(*number);
  pass.yielded(*number);
  return Range{part.begin, part.end};
}

// As it comes to a worker that joins.
PassStanding told(const SharedPass& pass) {
  return server::decode<PassStandings>(server::encode(PassStandings{{pass.standing()}})).passes.front();
}

}  // namespace

TEST_CASE("members divide batches of uneven sizes, and what one of them left comes again", "[data]") {
  const auto members = std::make_shared<Two>();
  SharedPass pass(members, 0, {0, 0}, batches({4, 3, 1}));
  const auto hold = pass.hold();
  CHECK(get(pass) == Range{0, 2});
  CHECK_FALSE(pass.begin_step());
  CHECK(pass.oldest_position() == 0);
  members->live = {0};
  pass.end_step(WindowEnd::closed, {0});
  CHECK(pass.wait_for_more());
  CHECK(pass.oldest_position() == 2);
  CHECK(get(pass) == Range{2, 4});
  pass.begin_step();
  pass.end_step(WindowEnd::dropped, {});
  CHECK(get(pass) == Range{4, 7});
  CHECK(get(pass) == Range{7, 8});
  CHECK(get(pass) == std::nullopt);
  CHECK_FALSE(pass.wait_for_more());
}

TEST_CASE("each replica of the members has a part, and what a worker of several left is divided anew", "[data]") {
  const auto members = std::make_shared<Two>();
  members->live = {0, 1, 2};
  const std::vector<int> replicas{2, 1, 2};
  SharedPass pass(members, 0, {0, 0}, batches({12, 3}), replicas);
  SharedPass other(members, 2, {0, 0}, batches({12, 3}), replicas);
  const auto holds = std::array{pass.hold(), other.hold()};
  const auto next_of = [](SharedPass& of) {
    const auto number = of.next().value();
    const auto part = of.part_of(number);
    of.yielded(number);
    return part;
  };
  const auto first = next_of(pass);
  CHECK(first.batch == 0);
  CHECK((first.begin == 0 && first.end == 6));
  CHECK(first.sizes == std::vector<int64_t>{3, 3});
  const auto last = next_of(other);
  CHECK((last.begin == 8 && last.end == 12));
  CHECK(last.sizes == std::vector<int64_t>{2, 2});
  pass.begin_step();
  members->live = {0, 1};
  pass.end_step(WindowEnd::closed, {0, 1});
  pass.done();
  const auto again = next_of(pass);
  CHECK((again.batch == 8 && again.begin == 8 && again.end == 11));
  CHECK(again.sizes == std::vector<int64_t>{2, 1});
  members->live = {1};
  pass.begin_step();
  pass.end_step(WindowEnd::closed, {0, 1});
  pass.done();
  const auto none = next_of(pass);
  CHECK(none.begin == none.end);
  CHECK(none.sizes == std::vector<int64_t>{0, 0});
}

TEST_CASE("a shared pass knows how many of its batches were trained on, and begins behind so many", "[data]") {
  const auto members = std::make_shared<Two>();
  SharedPass pass(members, 0, {0, 0}, batches({4, 3, 2, 5}));
  const auto hold = pass.hold();
  const auto step = [](SharedPass& of, const std::vector<uint32_t>& took_part) {
    of.begin_step();
    of.end_step(WindowEnd::closed, took_part);
  };
  CHECK(pass.num_trained() == 0);
  get(pass);
  const auto ahead = pass.next().value();
  step(pass, {0, 1});
  CHECK(pass.num_trained() == 1);  // the one that is read ahead is not
  pass.yielded(ahead);
  step(pass, {0});  // rank 1 has left sample 6 undone
  CHECK(pass.num_trained() == 1);
  members->live = {0};
  const auto again = pass.next().value();
  CHECK(pass.part_of(again).begin == 6);
  const auto behind = pass.next().value();
  CHECK(pass.num_trained() == 1);
  pass.yielded(again);
  step(pass, {0});
  CHECK(pass.num_trained() == 2);
  pass.yielded(behind);
  step(pass, {0});
  CHECK(pass.num_trained() == 3);

  SharedPass next(members, 0, {0, 0}, batches({4, 3, 2, 5}));
  next.skip(3);
  CHECK(next.num_trained() == 3);
  CHECK(get(next) == Range{9, 14});
  CHECK(next.num_trained() == 3);
  step(next, {0});
  CHECK(next.num_trained() == 4);
  CHECK(get(next) == std::nullopt);
  SharedPass past(members, 0, {0, 0}, batches({4, 3}));
  past.skip(9);
  CHECK(past.num_trained() == 2);
  CHECK(get(past) == std::nullopt);
}

TEST_CASE("a worker that joins a shared pass reads what the others go on with", "[data]") {
  const auto members = std::make_shared<Two>();
  SharedPass stayed(members, 0, {0, 5}, batches({4, 4, 3, 5}));
  const auto hold = stayed.hold();
  get(stayed);
  stayed.begin_step();
  const auto ahead = stayed.next().value();
  const auto others = told(stayed);
  CHECK(others.taken == 2);
  members->live = {0, 1, 2};
  stayed.end_step(WindowEnd::closed, {0});

  SharedPass joiner(members, 2, {0, 5}, batches({4, 4, 3, 5}));
  joiner.go_on(others, {0});
  CHECK(get(joiner) == Range{8, 8});  // it was promised to the two alone
  CHECK(stayed.part_of(ahead).end == 6);
  stayed.yielded(ahead);
  CHECK(get(joiner) == Range{4, 4});  // of the lost one, by three: 2 to 4
  CHECK(get(stayed) == Range{2, 3});
  CHECK(get(joiner) == Range{10, 11});
  CHECK(get(stayed) == Range{8, 9});
}

TEST_CASE("a shared pass that was left is at its end for whoever joins", "[data]") {
  SharedPass pass(std::make_shared<Two>(), 0, {0, 0}, batches({4, 4}));
  auto hold = pass.hold();
  CHECK_FALSE(told(pass).is_left);
  hold.reset();
  CHECK(told(pass).is_left);
  SharedPass joiner(std::make_shared<Two>(), 1, {0, 0}, batches({4, 4}));
  const auto joiners = joiner.hold();
  joiner.go_on(told(pass), {0});
  CHECK(get(joiner) == std::nullopt);
  CHECK(told(joiner).is_left);
  pass.end();
  CHECK_FALSE(told(pass).is_left);
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
  SharedPass pass(std::make_shared<Two>(), 0, {0, 0}, batches({1, 1, 1}));
  PassStanding others{.taken = 3, .again = {{1, 3}}};
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
