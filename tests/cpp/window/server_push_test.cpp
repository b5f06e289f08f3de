#include "window/server_push.h"

#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros.h>

#include <map>

#include "cpp/catch.h"

namespace muster {

TEST_CASE("servers are handed each parameter's sum once, as its bucket is reduced", "[window]") {
  Buckets buckets({{"a", at::zeros({2, 2})}, {"b", at::zeros({3})}});
  buckets.lay_out({}, /*bucket_bytes=*/1, 1, 0);
  buckets.allocate(*comm::make_single(), at::kBFloat16);  // which is the ranks' business alone
  REQUIRE(buckets.size() == 2);
  std::map<size_t, at::Tensor> taken;
  ServerPush push(buckets, [&](size_t p, const at::Tensor& sum) {
    CHECK(taken.count(p) == 0);
    taken[p] = sum;
  });
  for (size_t b = 0; b < 2; ++b) {
    buckets[b].sums.fill_(1.0 + 1.0 / 1024);
    CHECK(push.reduce(b).done());
    CHECK(taken.size() == b + 1);
  }
  push.finish();
  for (size_t p = 0; p < 2; ++p) {
    CHECK(taken[p].is_same(buckets.view(p)));
    CHECK(taken[p].equal(at::full_like(taken[p], 1.0 + 1.0 / 1024)));
  }
  CHECK_FALSE(push.reads_gradients());
}

}  // namespace muster
