#include "window/server_push.h"

#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>

#include <future>
#include <map>
#include <optional>
#include <vector>

#include "cpp/catch.h"
#include "muster/error.h"
#include "support/run_ranks.h"

namespace muster {

namespace {

// Of two parameters, each in a bucket of its own.
struct TwoBuckets : Buckets {
  explicit TwoBuckets(comm::Communicator& replicas) : Buckets({{"a", at::zeros({2, 2})}, {"b", at::zeros({3})}}) {
    lay_out({}, /*bucket_bytes=*/1, 1, 0);
    allocate(replicas, std::nullopt);
  }
};

}  // namespace

TEST_CASE("servers are handed each parameter's sum once, as its bucket is reduced", "[window]") {
  const auto alone = comm::make_single();
  const TwoBuckets buckets(*alone);
  REQUIRE(buckets.size() == 2);
  std::map<size_t, at::Tensor> taken;
  ServerPush push(*alone, buckets, [&](size_t p, const at::Tensor& sum) {
    CHECK(taken.count(p) == 0);
    taken[p] = sum;
  });
  for (size_t b = 0; b < 2; ++b) {
    buckets[b].sums.fill_(1.0 + 1.0 / 1024);
    auto work = push.reduce(b);
    CHECK(taken.size() == b + 1);
    CHECK(work.done());
    work.wait();
  }
  push.finish();
  for (size_t p = 0; p < 2; ++p) {
    CHECK(taken[p].is_same(buckets.view(p)));
    CHECK(taken[p].equal(at::full_like(taken[p], 1.0 + 1.0 / 1024)));
  }
  CHECK_FALSE(push.reads_gradients());
}

TEST_CASE("the first of a worker's replicas hands over what all of them have together", "[window]") {
  constexpr int kReplicas = 3;
  const auto replicas = comm::make_local(kReplicas, testing::Seconds(60));
  std::map<size_t, at::Tensor> taken;
  CHECK(testing::run_threads(kReplicas, [&](int r) {
          auto& own = *replicas[static_cast<size_t>(r)];
          const TwoBuckets buckets(own);
          ServerPush push(own, buckets, [&](size_t p, const at::Tensor& sum) {
            MUSTER_CHECK(r == 0);
            MUSTER_CHECK(taken.count(p) == 0);
            taken[p] = sum.clone();
          });
          std::vector<comm::Work> works;
          for (size_t b = 0; b < 2; ++b) {
            buckets[b].sums.fill_(1 << r);
            works.push_back(push.reduce(b));
          }
          for (auto& work : works) work.wait();
          for (auto& work : works) MUSTER_CHECK(work.done());
          push.finish();
        }) == "");
  REQUIRE(taken.size() == 2);
  for (const auto& [p, sum] : taken) CHECK(sum.equal(at::full_like(sum, 7)));
}

TEST_CASE("what servers were not handed is not handed to them again", "[window]") {
  const auto replicas = comm::make_local(2, testing::Seconds(60));
  std::promise<void> given;
  const auto is_given = given.get_future().share();
  int calls = 0;
  CHECK(testing::run_threads(2, [&](int r) {
          auto& own = *replicas[static_cast<size_t>(r)];
          const TwoBuckets buckets(own);
          ServerPush push(own, buckets, [&](size_t, const at::Tensor&) {
            ++calls;
            throw PeerLost(-1, "a server is gone");
          });
          if (r == 1) return is_given.wait(), push.reduce(0).wait();
          auto work = push.reduce(0);
          MUSTER_CHECK(!work.done());
          given.set_value();
          testing::message_of<PeerLost>([&] { work.wait(); });
          work.wait();
          MUSTER_CHECK(work.done());
        }) == "");
  CHECK(calls == 1);
}

}  // namespace muster
