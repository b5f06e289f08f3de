// Norms and means that the host takes of a window's sums.
#include "window/host_norm.h"

#include <cmath>
#include <limits>

#include "cpp/catch.h"
#include "cpp/window/fixtures.h"

using namespace muster;
using namespace muster::testing;

namespace {

// Gradients of 3 and 4, and none of c.
struct Triangle {
  explicit Triangle(const StrategyOptions& options = {}, at::ScalarType dtype = at::kFloat)
      : a(leaf(1, 1, dtype)), b(leaf(1, 1, dtype)), c(leaf(1, 1, dtype)), job({{"a", a}, {"b", b}, {"c", c}}, options) {
    job.build();
  }
  Tail accumulate(double a_gradient = 3) { return job.accumulate((a * a_gradient + b * 4).sum()); }

  at::Tensor a;
  at::Tensor b;
  at::Tensor c;
  OneReplica job;
};

}  // namespace

TEST_CASE("the norm is that of the means, and its clip bounds it", "[window]") {
  StrategyOptions options;
  options.clip_norm = 1;
  Triangle window(options);
  const auto tail = window.accumulate();
  auto scalars = scalars_with(1);
  take_host_norm(window.job.context(), tail, /*loss_scale=*/2, scalars);
  CHECK(scalars.divisor == 2);
  CHECK(scalars.norm == Approx(2.5));
  CHECK(scalars.clip * scalars.norm == Approx(1).epsilon(1e-5));
  CHECK(scalars.finite == 1);
  divide_sums(window.job.context(), tail, scalars.divisor);
  CHECK(is_all(window.job.sums.sum_of(tail, 0), 1.5));
}

TEST_CASE("clipped means are left in .grad, of what had gradients", "[window]") {
  StrategyOptions options;
  options.clip_value = 1.75;
  Triangle window(options);
  const auto tail = window.accumulate();
  WindowSums sums;
  leave_clipped_means(window.job.context(), tail, /*divisor=*/2, sums);
  CHECK(sums.grad_norm == Approx(2.5));
  CHECK(sums.finite);
  CHECK(is_all(window.a.grad(), 1.5));
  CHECK(is_all(window.b.grad(), 1.75));
  CHECK_FALSE(window.c.grad().defined());
}

TEST_CASE("a norm that overflows is not a gradient that is not finite", "[window]") {
  const double gradient = GENERATE(1e200, std::numeric_limits<double>::infinity());
  Triangle window({}, at::kDouble);
  const auto tail = window.accumulate(gradient);
  auto scalars = scalars_with(1);
  take_host_norm(window.job.context(), tail, 1, scalars);
  CHECK(std::isinf(scalars.norm));
  CHECK(scalars.finite == (std::isfinite(gradient) ? 1 : 0));
  WindowSums sums;
  leave_clipped_means(window.job.context(), tail, 1, sums);
  CHECK(sums.finite == std::isfinite(gradient));
}
