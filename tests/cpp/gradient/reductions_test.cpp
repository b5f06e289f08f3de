#include "gradient/reductions.h"

#include <ATen/ops/zeros.h>

#include "cpp/catch.h"
#include "gradient/all_reduction.h"
#include "support/run_ranks.h"

namespace muster {
namespace {

using comm::Communicator;
using comm::CommunicatorPtr;
using namespace testing;

CommunicatorPtr handle_on(Communicator& communicator) { return {CommunicatorPtr(), &communicator}; }

Buckets one_bucket(Communicator& communicator) {
  Buckets buckets({{"a", at::zeros({1 << 10})}});
  buckets.lay_out({}, 1 << 20, 1 << 20, 0);
  buckets.allocate(communicator, std::nullopt);
  return buckets;
}

}  // namespace

TEST_CASE("a micro-batch's sums go to their owners where it asks and ranks see one another's memory", "[gradient]") {
  CHECK(Local::run(2, [](Communicator& c) {
          const auto buckets = one_bucket(c);
          Reductions reductions(handle_on(c), buckets, nullptr, Receive::yes, /*least_lent_bytes=*/1, 2);
          MUSTER_CHECK(dynamic_cast<AllReduction*>(&reductions.chosen()) != nullptr);
          MUSTER_CHECK(reductions.memory() == nullptr);
          reductions.choose(/*to_owners=*/true);
          MUSTER_CHECK(&reductions.chosen() == reductions.owners());
          MUSTER_CHECK(reductions.reads_gradients());
          MUSTER_CHECK(reductions.memory() != nullptr);
          reductions.choose(/*to_owners=*/false);
          MUSTER_CHECK(dynamic_cast<AllReduction*>(&reductions.chosen()) != nullptr);
        }) == "");
}

TEST_CASE("sums go to all where ranks do not see one another's memory", "[gradient]") {
  const auto single = comm::make_single();
  const auto buckets = one_bucket(*single);
  Reductions reductions(single, buckets, nullptr, Receive::yes, 1, 2);
  CHECK(reductions.owners() == nullptr);
  reductions.choose(/*to_owners=*/true);
  CHECK(dynamic_cast<AllReduction*>(&reductions.chosen()) != nullptr);
  CHECK(reductions.memory() == nullptr);
}

TEST_CASE("a reduction of one's own takes the place of all others", "[gradient]") {
  struct Own final : BucketReduction {
    comm::Work reduce(size_t) override { return {}; }
  };
  CHECK(Local::run(2, [](Communicator& c) {
          const auto buckets = one_bucket(c);
          Reductions reductions(
              handle_on(c), buckets, [](const Buckets&) { return std::make_unique<Own>(); }, Receive::yes, 1, 2);
          reductions.choose(/*to_owners=*/true);
          MUSTER_CHECK(dynamic_cast<Own*>(&reductions.chosen()) != nullptr);
          MUSTER_CHECK(reductions.owners() == nullptr);
        }) == "");
}

}  // namespace muster
