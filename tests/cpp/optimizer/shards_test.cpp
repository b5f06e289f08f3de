#include "optimizer/shards.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>

#include "cpp/catch.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::testing;

namespace {

using Seconds = std::chrono::seconds;

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

TEST_CASE("every rank gets the runs of the others, gathered in pieces or broadcast", "[optimizer]") {
  using Exchange = void (*)(const std::vector<at::Tensor>&, const std::vector<std::vector<Run>>&, comm::Communicator&);
  const auto exchange = GENERATE(Exchange(exchange_runs), Exchange(broadcast_runs));
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
            exchange(memories, runs, *groups[static_cast<size_t>(rank)]);
            for (size_t i = 0; i < numels.size(); ++i) {
              const auto first = static_cast<double>(1000 * i);
              MUSTER_CHECK(memories[i].equal(at::arange(first, first + numels[i]).to(at::kFloat)));
            }
          }) == "");
  }
}
