// Which runs of a bucket go to which rank. What the sums are: bucket_reduction_test.cpp.
#include "gradient/shard_reduction.h"

#include <ATen/ops/full.h>

#include "cpp/catch.h"

using namespace muster;

namespace {

std::vector<NamedParameter> parameters_of(const std::vector<int64_t>& numels) {
  std::vector<NamedParameter> parameters;
  for (size_t p = 0; p < numels.size(); ++p) {
    parameters.push_back({"p" + std::to_string(p), at::full({numels[p]}, 1.0F).requires_grad_()});
  }
  return parameters;
}

// One bucket, in the order of registration.
Buckets buckets_of(const std::vector<int64_t>& numels) {
  Buckets buckets(parameters_of(numels));
  std::vector<int> order(numels.size());
  for (size_t p = 0; p < order.size(); ++p) order[p] = static_cast<int>(p);
  buckets.lay_out(order, 1 << 20, 1 << 20, 0);
  return buckets;
}

}  // namespace

TEST_CASE("neighbours of one rank are reduced as one, and cut parameters apart", "[gradient]") {
  auto group = comm::make_single();
  auto buckets = buckets_of({10, 7, 100, 3});
  buckets.allocate(*group, {});
  REQUIRE(buckets.size() == 1);
  const auto at = [&](size_t p) { return buckets.slot(p).offset; };
  const Shards shards = {{{0, 10}, {0, 7}, {0, 40}, {}}, {{}, {}, {40, 60}, {0, 3}}};
  const auto runs = runs_in_bucket(buckets, 0, shards);
  REQUIRE(runs.size() == 2);
  const auto is = [](const comm::OwnedRun& run, int rank, int64_t begin, int64_t end) {
    return run.rank == rank && run.begin == begin && run.begin + run.count == end;
  };
  CHECK(is(runs[0], 0, at(0), at(2) + 40));
  CHECK(is(runs[1], 1, at(2) + 40, at(3) + 3));
}
