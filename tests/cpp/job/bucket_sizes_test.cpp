#include "job/bucket_sizes.h"

#include <torch/nn/modules/linear.h>

#include "cpp/catch.h"
#include "muster/mirrored.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::testing;

TEST_CASE("buckets hide their latency, within bounds", "[strategy]") {
  const auto choose = [](const LinkSpeed& link) { return choose_buckets(link, /*in_one_memory=*/false); };
  const BucketSizes fast = choose({20e-6, 10e9});
  CHECK(fast.usual ==
        2 << 20);  // 20 us at 10 GB/s are 0.2 MB, a twentieth of 4 MB, of which the next power of two below
  CHECK(fast.first == 256 << 10);
  CHECK(fast.last == fast.first);
  CHECK(choose({1e-9, 1e6}).usual == 1 << 20);
  CHECK(choose({1, 1e12}).usual == 32 << 20);
  CHECK(choose({1, 1e12}).last == 4 << 20);
  CHECK(choose({1e-3, 1e9}).usual == 16 << 20);
}

TEST_CASE("buckets that ranks read in one memory stay in a cache, however long ranks waited", "[strategy]") {
  for (const double latency : {2e-6, 1e-3}) {
    const BucketSizes near = choose_buckets({latency, 10e9}, /*in_one_memory=*/true);
    CHECK(near.usual == 64 << 10);
    CHECK(near.first == near.usual);
    CHECK(near.last == near.usual);
  }
}

TEST_CASE("every rank has what the chief measured", "[strategy]") {
  const auto groups = comm::make_local(3, Seconds(60));
  std::vector<LinkSpeed> links(3);
  CHECK(run_threads(3, [&](int rank) {
          links[static_cast<size_t>(rank)] = measure_link(*groups[static_cast<size_t>(rank)]);
        }) == "");
  for (const auto& link : links) {
    CHECK(link.latency > 0);
    CHECK(link.bandwidth > 0);
    CHECK(link.latency == links[0].latency);
    CHECK(link.bandwidth == links[0].bandwidth);
  }
}

TEST_CASE("what was chosen is explained", "[strategy]") {
  const auto explained = [](const StrategyOptions& options) {
    MirroredStrategy strategy({"cpu:0", "cpu:1"}, options);
    strategy.prepare([] { return torch::nn::Linear(2, 2); });
    return strategy.explain();
  };
  CHECK(contains(explained({}), "up to 64 KiB, which a core's cache holds"));
  CHECK(contains(explained({}), "GB/s"));
  CHECK(contains(explained({}), "each replica what it owns"));
  CHECK(contains(explained({.bucket_bytes = 3 << 20}), "up to 3 MiB, as bucket_bytes says"));
  CHECK(contains(explained({.fuse = false}), "all step from .grad"));
  MirroredStrategy closed({"cpu:0", "cpu:1"});
  closed.close();
  CHECK(contains(closed.explain(), "closed"));
}
