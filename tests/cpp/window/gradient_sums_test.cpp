// The sums that a set's engines hold after a window.
#include "window/gradient_sums.h"

#include <ATen/ops/embedding.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>

#include "cpp/catch.h"
#include "cpp/window/fixtures.h"
#include "muster/error.h"

using namespace muster;
using namespace muster::testing;

namespace {

struct Set {
  Set()
      : a(leaf(1)),
        frozen(leaf(1).requires_grad_(false)),
        rows(at::ones({5, 2}).requires_grad_()),
        unused(leaf(1)),
        job({{"a", a}, {"frozen", frozen}, {"rows", rows}, {"unused", unused}}) {
    job.build();
  }
  Tail accumulate() {
    const auto looked_up = at::embedding(rows, at::tensor({3, 3, 1}), -1, false, /*sparse=*/true);
    return job.accumulate((a * 2).sum() + looked_up.sum());
  }

  at::Tensor a;
  at::Tensor frozen;
  at::Tensor rows;
  at::Tensor unused;
  OneReplica job;
};

}  // namespace

TEST_CASE("a parameter's sum is dense, rows, or none", "[window]") {
  Set set;
  auto& sums = set.job.sums;
  CHECK(sums.trainable() == std::vector<int>{0, 2, 3});
  CHECK(sums.index_of(2) == 1);
  CHECK(sums.index_of(1) == -1);
  const auto tail = set.accumulate();
  CHECK(is_all(sums.sum_of(tail, 0), 2));
  REQUIRE(sums.sum_of(tail, 1).is_sparse());
  CHECK(sums.sum_of(tail, 1)._indices().equal(at::tensor({1, 3}, at::kLong).view({1, 2})));
  CHECK_FALSE(sums.sum_of(tail, 2).defined());
  CHECK(sums.used(tail).size() == 2);
  CHECK(sums.dense(tail)[1].equal(at::tensor({1.F, 1.F, 2.F, 2.F}).view({2, 2})));
  CHECK(sums.has_sparse(tail));
  CHECK(sums.are_finite(tail));
  const auto gradients = sums.gradients_of(tail, {2, 1, 0}, 0);
  CHECK(gradients[0].sparse.defined());
  CHECK_FALSE(gradients[1].defined());
  CHECK(is_all(gradients[2].dense, 2));
  sums.sum_of(tail, 0)[1] = INFINITY;
  CHECK_FALSE(sums.are_finite(tail));
}

TEST_CASE("engines are stale once what is trained is another, or of another dtype", "[window]") {
  Set set;
  auto& sums = set.job.sums;
  CHECK_FALSE(sums.begin_window(set.job.all()));
  SECTION("a parameter is frozen") {
    set.a.set_requires_grad(false);
    CHECK(sums.begin_window(set.job.all()));
    set.job.build();
    CHECK(sums.trainable() == std::vector<int>{2, 3});
  }
  SECTION("a parameter is converted") {
    set.accumulate();
    CHECK_FALSE(sums.begin_window(set.job.all()));
    set.a.set_data(set.a.detach().to(at::kDouble));
    CHECK(sums.begin_window(set.job.all()));
  }
  SECTION("others are asked for") { CHECK(sums.begin_window({0, 2})); }
  CHECK_THROWS_AS(sums.build({1}, {}), InvalidArgument);
}

TEST_CASE("what an edit puts into .grad becomes the sum", "[window]") {
  Set set;
  const auto& sums = set.job.sums;
  const auto tail = set.accumulate();
  SECTION("of the same layout") {
    sums.edit(tail, [&] { set.a.mutable_grad() = at::ones({4}) * 7; });
    CHECK(is_all(sums.sum_of(tail, 0), 7));
    sums.show(sums.gradients_of(tail, {2}, 0), {2});
    CHECK(set.rows.grad().is_sparse());
    set.job.sums.clear();
    CHECK_FALSE(set.a.grad().defined());
    CHECK_FALSE(set.rows.grad().defined());
  }
  SECTION("of another") {
    CHECK_THROWS_AS(sums.edit(tail, [&] { set.rows.mutable_grad() = at::ones({5, 2}); }), InvalidArgument);
  }
  SECTION("of another shape") {
    CHECK_THROWS_WITH(sums.edit(tail, [&] { set.a.mutable_grad() = at::ones({1}); }), ContainsSubstring("shape"));
  }
  SECTION("nothing") {
    CHECK_THROWS_WITH(sums.edit(tail, [&] { set.a.mutable_grad() = at::Tensor(); }),
                      ContainsSubstring("took the gradient of 'a' away"));
  }
}
