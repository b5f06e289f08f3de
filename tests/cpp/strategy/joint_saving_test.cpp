// Strategy::save of several workers that see one folder: each writes a part, and together what one writes alone.
#include <algorithm>
#include <string>

#include "checkpoint/snapshot.h"
#include "cpp/catch.h"
#include "cpp/strategy/saved_jobs.h"
#include "muster/mirrored.h"
#include "support/folder.h"

using namespace muster;
using namespace muster::testing;
namespace fs = std::filesystem;

namespace {

constexpr int64_t kOutputs = 40'000;  // a weight of 320 kB, which both write

// Whether a worker wrote files of the newest checkpoint.
bool has_written(int rank, const fs::path& folder) {
  const auto prefix = "worker-" + std::to_string(rank) + '-';
  return std::ranges::any_of(fs::directory_iterator(folder), [&](const fs::directory_entry& entry) {
    return entry.path().filename().string().starts_with(prefix);
  });
}

}  // namespace

TEST_CASE("workers that see one folder write a checkpoint together", "[saving]") {
  const testing::Folder folder;
  StrategyOptions options;
  options.shard_optimizer = GENERATE(false, true);
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
