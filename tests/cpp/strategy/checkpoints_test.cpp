#include "muster/checkpoints.h"

#include <cmath>
#include <filesystem>
#include <limits>
#include <mutex>

#include "checkpoint/snapshot.h"
#include "cpp/catch.h"
#include "cpp/strategy/saved_jobs.h"
#include "muster/mirrored.h"
#include "support/folder.h"

using namespace muster;
using namespace muster::testing;

namespace {

namespace fs = std::filesystem;
using Steps = std::vector<int64_t>;
using Mode = CheckpointsOptions::Mode;

// Of the checkpoints in a folder, the newest last.
Steps steps_in(const fs::path& folder) {
  Steps steps;
  for (const auto& info : checkpoint::list_snapshots(folder)) {
    steps.push_back(std::get<int64_t>(info.metadata.at("steps")));
  }
  return steps;
}

// A strategy of two replicas, or each of two workers.
void run_either(const std::function<void(Strategy& strategy)>& body, const StrategyOptions& options = {}) {
  SECTION("two replicas") {
    MirroredStrategy strategy(cpus(2), options);
    body(strategy);
  }
  SECTION("two workers") { run_workers(body, options); }
}

}  // namespace

TEST_CASE("every nth step is saved, the newest stay, and the job goes on from them", "[saving]") {
  const Folder folder;
  run_either([&](Strategy& strategy) {
    Small small(strategy);
    Checkpoints checkpoints(strategy, folder.path, {.every = 3, .keep = 2});
    MUSTER_CHECK(!checkpoints.load());
    for (int i = 0; i < 10; ++i) MUSTER_CHECK(!checkpoints.after_step(small.step(strategy), {{"number", i}}));
    strategy.close();
    MUSTER_CHECK((!strategy.is_chief() || steps_in(folder.path) == Steps{6, 9}));  // it waits for what it writes
  });
  MirroredStrategy next(cpus(1));
  Small small(next);
  Checkpoints checkpoints(next, folder.path, {.every = 3});
  const auto state = checkpoints.load();
  REQUIRE(state);
  CHECK(state->at("number").get<int64_t>() == 8);
  CHECK(next.steps() == 9);
  for (int i = 0; i < 4; ++i) checkpoints.after_step(small.step(next));
  next.close();
  CHECK(steps_in(folder.path) == Steps{6, 9, 12});
}

TEST_CASE("a checkpoint waits until no window is open", "[saving]") {
  const Folder folder;
  StrategyOptions options;
  options.accumulate = 2;
  run_either(
      [&](Strategy& strategy) {
        Small small(strategy);
        Checkpoints checkpoints(strategy, folder.path, {.every = 1});
        for (int i = 0; i < 5; ++i) MUSTER_CHECK(!checkpoints.after_step(small.step(strategy)));
        MUSTER_CHECK(!checkpoints.after_step(strategy.flush()));
        MUSTER_CHECK(!checkpoints.after_step(std::nullopt));
        strategy.close();
        MUSTER_CHECK((!strategy.is_chief() || steps_in(folder.path) == Steps{1, 2, 3}));
      },
      options);
}

TEST_CASE("where the job stops it saves once, and all ranks leave", "[saving]") {
  const Folder folder;
  run_either([&](Strategy& strategy) {
    Small small(strategy);
    Checkpoints checkpoints(strategy, folder.path);
    MUSTER_CHECK(!checkpoints.after_step(small.step(strategy)));
    if (strategy.rank() == strategy.num_workers() - 1) strategy.stop();
    MUSTER_CHECK(checkpoints.after_step(small.step(strategy)));
    MUSTER_CHECK(checkpoints.after_step(std::nullopt));  // it has saved after this step
    strategy.close();
    MUSTER_CHECK((!strategy.is_chief() || steps_in(folder.path) == Steps{2}));
  });
}

TEST_CASE("the best is kept and known to the next job, and the chief's metric decides", "[saving]") {
  const Folder folder;
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  run_either([&](Strategy& strategy) {
    Small small(strategy);
    const auto bests = [&](const std::vector<double>& metrics, const CheckpointsOptions& options) {
      Checkpoints checkpoints(strategy, folder.path, options);
      std::vector<bool> found;
      for (const double metric : metrics) {
        checkpoints.after_step(small.step(strategy));
        found.push_back(checkpoints.best(strategy.is_chief() ? metric : 0, {{"epoch", strategy.steps()}}));
      }
      return found;
    };
    MUSTER_CHECK(
        (bests({kNan, 0.5, 0.75, 0.25, 0.25}, {.best_keep = 2}) == std::vector<bool>{false, true, false, true, false}));
    MUSTER_CHECK((bests({0.3, 0.125}, {.every = 1, .keep = 1}) == std::vector<bool>{false, true}));
    const auto state = strategy.load(folder.path / "best");
    MUSTER_CHECK(state && state->at("epoch").get<int64_t>() == 7);
    MUSTER_CHECK(strategy.steps() == 7);
    const auto& best = state->at("best").get<SavedValue::Dict>();
    MUSTER_CHECK(best.at("metric").get<double>() == 0.125);
    std::string error;
    try {
      Checkpoints(strategy, folder.path, {.mode = Mode::max}).best(1);
    } catch (const Error& raised) {
      error = raised.what();
    }
    MUSTER_CHECK(error.find("is the best by mode min, and mode max was given") != std::string::npos);
    strategy.close();
    MUSTER_CHECK((!strategy.is_chief() || steps_in(folder.path / "best") == Steps{7}));
  });
}

TEST_CASE("a best checkpoint that is damaged is not the best", "[saving]") {
  const Folder folder;
  const std::string damaged = GENERATE("manifest.json", "shard-00000.safetensors");
  {
    MirroredStrategy strategy(cpus(1));
    Small small(strategy);
    Checkpoints checkpoints(strategy, folder.path, {.best_keep = 2});
    CHECK(checkpoints.best(0.5));
    CHECK(checkpoints.best(0.25));
    CHECK_FALSE(checkpoints.best(0.375));
  }
  const auto spoil = [&](const char* name) {
    const auto path = folder.path / "best" / name / damaged;
    std::filesystem::resize_file(path, std::filesystem::file_size(path) / 2);
  };
  MirroredStrategy strategy(cpus(1));
  Small small(strategy);
  const auto is_best = [&](double metric) { return Checkpoints(strategy, folder.path, {.best_keep = 2}).best(metric); };
  CHECK_FALSE(is_best(0.375));
  spoil("snapshot-0000000002");
  CHECK_FALSE(is_best(0.5));
  spoil("snapshot-0000000001");
  CHECK(is_best(0.75));
  CHECK_FALSE(is_best(0.75));
}

TEST_CASE("what is wrong on one rank alone is said on all", "[saving]") {
  const Folder folder;
  std::mutex mutex;
  std::vector<std::string> errors;
  run_workers([&](Strategy& strategy) {
    Small small(strategy);
    Checkpoints checkpoints(strategy, folder.path);
    try {
      checkpoints.best(0.5, strategy.rank() == 1 ? SavedState{{"best", 1}} : SavedState{});
    } catch (const Error& error) {
      const std::lock_guard lock(mutex);
      errors.emplace_back(error.what());
    }
    MUSTER_CHECK(checkpoints.best(0.5));
  });
  REQUIRE(errors.size() == 2);
  for (const auto& error : errors) CHECK_THAT(error, ContainsSubstring("'best' is what best() calls its metric"));
}

TEST_CASE("without a folder it says only when the job stops; nonsense is refused", "[saving]") {
  MirroredStrategy strategy(cpus(1));
  Small small(strategy);
  Checkpoints checkpoints(strategy, {}, {.every = 1, .every_seconds = 1e-9});
  CHECK(!checkpoints.load());
  CHECK(!checkpoints.after_step(small.step(strategy)));
  CHECK(!checkpoints.best(0.5));
  CHECK_THROWS_AS(checkpoints.save({{"best", 1}}), InvalidArgument);
  strategy.stop();
  CHECK(checkpoints.after_step(small.step(strategy)));
  CHECK_THROWS_AS(Checkpoints(strategy, "folder", {.every = 0}), InvalidArgument);
  for (const double seconds : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    CHECK_THROWS_AS(Checkpoints(strategy, {}, {.every_seconds = seconds}), InvalidArgument);
  }
  CHECK_THROWS_AS(Checkpoints(strategy, "folder", {.keep = 0}), InvalidArgument);
  CHECK_THROWS_AS(Checkpoints(strategy, "folder", {.best_keep = -1}), InvalidArgument);
}

TEST_CASE("a job that goes on from a checkpoint is of its lineage, and another one is not", "[saving]") {
  const Folder folder;
  const auto lineage_after = [&](bool loads) {
    MirroredStrategy strategy(cpus(1));
    Small small(strategy);
    if (loads) strategy.load(folder.path);
    for (int time = 0; time < 2; ++time) strategy.save(folder.path);
    strategy.close();
    std::vector<std::string> found;
    for (const auto& info : checkpoint::list_snapshots(folder.path)) {
      found.push_back(std::get<std::string>(info.metadata.at("muster.lineage")));
    }
    CHECK(found.end()[-2] == found.back());
    return found.back();
  };
  const auto first = lineage_after(false);
  CHECK(first.size() == 16);
  CHECK(lineage_after(true) == first);
  const auto other = lineage_after(false);
  CHECK(other != first);
  CHECK(lineage_after(true) == other);
}

TEST_CASE("one checkpoint is loaded by its number, and by its path", "[saving]") {
  const Folder folder;
  run_either([&](Strategy& strategy) {
    Small small(strategy);
    Checkpoints checkpoints(strategy, folder.path, {.every = 1});
    for (int i = 0; i < 3; ++i) MUSTER_CHECK(!checkpoints.after_step(small.step(strategy), {{"number", i}}));
    MUSTER_CHECK(checkpoints.load(2).value().at("number").get<int64_t>() == 1);
    MUSTER_CHECK(strategy.steps() == 2);
    MUSTER_CHECK(strategy.load(folder.path / "snapshot-0000000001/").has_value());
    MUSTER_CHECK(strategy.steps() == 1);
    MUSTER_CHECK(message_of<CheckpointError>([&] { checkpoints.load(7); }).find("snapshot-0000000007") !=
                 std::string::npos);
    MUSTER_CHECK(message_of<InvalidArgument>([&] { checkpoints.load(0); }).starts_with("number=0"));
    MUSTER_CHECK(strategy.steps() == 1);
    MUSTER_CHECK(checkpoints.load().has_value());
    MUSTER_CHECK(strategy.steps() == 3);
  });
}
