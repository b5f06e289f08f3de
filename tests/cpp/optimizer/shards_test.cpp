#include "optimizer/shards.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>

#include <algorithm>

#include "cpp/catch.h"
#include "kernels/kernels.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::testing;

namespace {

using Seconds = std::chrono::seconds;

constexpr auto kTile = static_cast<int64_t>(kernels::kTile);

std::vector<std::vector<Run>> runs_of_ranks(const std::vector<int64_t>& numels, int ranks) {
  std::vector<std::vector<Run>> runs;
  for (int r = 0; r < ranks; ++r) runs.push_back(runs_of(numels, {r, ranks}));
  return runs;
}

}  // namespace

TEST_CASE("runs cover every element once", "[optimizer]") {
  const std::vector<int64_t> numels{10, 0, 4096, 5000, 1, 12288};
  for (int ranks = 1; ranks <= 9; ++ranks) {
    std::vector<int64_t> covered(numels.size(), 0);
    for (int r = 0; r < ranks; ++r) {
      const auto runs = runs_of(numels, {r, ranks});
      for (size_t i = 0; i < numels.size(); ++i) {
        if (runs[i].count > 0) CHECK(runs[i].begin == covered[i]);
        covered[i] += runs[i].count;
      }
    }
    CHECK(covered == numels);
  }
}

TEST_CASE("parts of a shard cover it once, as equal as tiles allow", "[optimizer]") {
  const std::vector<int64_t> numels{10, 0, 4096, 5000, 1, 12288, 40'960};
  for (const int parts : {1, 2, 3, 5}) {
    const auto shard = runs_of(numels, {1, 3});
    std::vector<int64_t> end;
    for (const auto& run : shard) end.push_back(run.begin);
    std::vector<int64_t> tiles;
    for (int part = 0; part < parts; ++part) {
      const auto runs = runs_of(numels, {1, 3}, {part, parts});
      tiles.push_back(0);
      for (size_t i = 0; i < numels.size(); ++i) {
        if (runs[i].count > 0) CHECK(runs[i].begin == end[i]);
        end[i] += runs[i].count;
        tiles.back() += (runs[i].count + kTile - 1) / kTile;
      }
    }
    for (size_t i = 0; i < numels.size(); ++i) CHECK(end[i] == shard[i].begin + shard[i].count);
    CHECK(*std::max_element(tiles.begin(), tiles.end()) - *std::min_element(tiles.begin(), tiles.end()) <= 1);
  }
}

TEST_CASE("every rank gets the runs of the others, gathered in pieces or broadcast", "[optimizer]") {
  const bool broadcasts = GENERATE(false, true);
  // Large ones in places of their own, and of small ones more than travel at once; the last rank of nine has none.
  std::vector<int64_t> numels(20, 450'000);
  numels.insert(numels.end(), {10, 0, 2'000'000, 5000, 1});
  const bool is_short = GENERATE(false, true);
  if (is_short) numels = {10, 0, 4097};
  for (const int ranks : {1, 2, is_short ? 9 : 3}) {
    const auto runs = runs_of_ranks(numels, ranks);
    const auto groups = comm::make_local(ranks, Seconds(60));
    CHECK(run_threads(ranks, [&](int rank) {
            std::vector<at::Tensor> memories;
            for (size_t i = 0; i < numels.size(); ++i) {
              memories.push_back(at::full({numels[i]}, -1.0F));
              const auto& run = runs[static_cast<size_t>(rank)][i];
              const auto first = static_cast<double>(1000 * i + run.begin);
              memories[i].narrow(0, run.begin, run.count).copy_(at::arange(first, first + run.count));
            }
            const auto& group = groups[static_cast<size_t>(rank)];
            broadcasts ? broadcast_runs({memories}, runs, {group}) : exchange_runs(memories, runs, *group);
            for (size_t i = 0; i < numels.size(); ++i) {
              const auto first = static_cast<double>(1000 * i);
              MUSTER_CHECK(memories[i].equal(at::arange(first, first + numels[i]).to(at::kFloat)));
            }
          }) == "");
  }
}

TEST_CASE("ranks of one process get the runs of all, each in its memory", "[optimizer]") {
  const std::vector<int64_t> numels{10, 0, 2'000'000, 5000, 1};
  const auto runs = runs_of_ranks(numels, 4);
  const auto groups = comm::make_local(4, Seconds(60));
  CHECK(run_threads(2, [&](int process) {
          std::vector<std::vector<at::Tensor>> memories(2);
          for (size_t l = 0; l < 2; ++l) {
            for (size_t i = 0; i < numels.size(); ++i) {
              memories[l].push_back(at::full({numels[i]}, -1.0F));
              const auto& run = runs[2 * static_cast<size_t>(process) + l][i];
              const auto first = static_cast<double>(1000 * i + run.begin);
              memories[l][i].narrow(0, run.begin, run.count).copy_(at::arange(first, first + run.count));
            }
          }
          const auto first = groups.begin() + 2 * process;
          broadcast_runs(memories, runs, {first, first + 2});
          for (const auto& own : memories) {
            for (size_t i = 0; i < numels.size(); ++i) {
              const auto begin = static_cast<double>(1000 * i);
              MUSTER_CHECK(own[i].equal(at::arange(begin, begin + numels[i]).to(at::kFloat)));
            }
          }
        }) == "");
}
