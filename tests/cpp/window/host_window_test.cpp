// What the host's window leaves at its end; what holds for every end is in window_test.cpp.
#include "window/host_window.h"

#include "cpp/catch.h"
#include "cpp/window/fixtures.h"

using namespace muster;
using namespace muster::testing;

namespace {

struct Playing {
  explicit Playing(const StrategyOptions& options = {})
      : w(leaf(1)), job({{"w", w}}, options), window(job.context(), nullptr), optimizer({{"w", w, 0}}, descent()) {
    job.build();
  }
  OneReplica::Ended play(double gradient, double weight, bool fused) {
    return job.play(window, loss_of((w * gradient).sum(), weight), fused);
  }
  void update(const Tail& tail) { window.update(tail, optimizer, {0}, descent(), alone); }

  at::Tensor w;
  OneReplica job;
  HostWindow window;
  FlatOptimizer optimizer;
};

}  // namespace

TEST_CASE("a window that is not fused leaves clipped means for any optimizer", "[window]") {
  StrategyOptions options;
  options.clip_value = 1;
  Playing set(options);
  const auto ended = set.play(3, 5, /*fused=*/false);
  CHECK(ended.sums.grad_norm == Approx(6));
  CHECK(is_all(set.w.grad(), 1));
  CHECK(is_all(set.w, 1));
}

TEST_CASE("a fused window keeps no gradients unless it is told to", "[window]") {
  StrategyOptions options;
  options.keep_gradients = GENERATE(false, true);
  Playing set(options);
  const auto ended = set.play(3, 5, /*fused=*/true);
  CHECK_FALSE(set.w.grad().defined());
  set.update(ended.tail);
  CHECK(is_all(set.w, 1 - 0.5 * 3));
  CHECK(set.w.grad().defined() == options.keep_gradients);
  if (options.keep_gradients) CHECK(is_all(set.w.grad(), 3));
  CHECK_FALSE(set.job.registry.was_written(0));
}

TEST_CASE("means that are edited are what the optimizer steps by", "[window]") {
  Playing set;
  const auto ended = set.play(3, 5, /*fused=*/true);
  const auto* scalars = set.window.leave_means(ended.tail, [&] {
    CHECK(is_all(set.w.grad(), 3));
    set.w.mutable_grad().mul_(2);
  });
  REQUIRE(scalars != nullptr);
  CHECK(scalars->norm == Approx(12));
  set.update(ended.tail);
  CHECK(is_all(set.w, 1 - 0.5 * 6));
}
