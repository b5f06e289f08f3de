// A set of parameters and its windows: when they open, what they refuse, and what their end tells.
#include "window/parameter_set.h"

#include <limits>

#include "cpp/catch.h"
#include "cpp/window/fixtures.h"
#include "muster/error.h"

using namespace muster;
using namespace muster::testing;

namespace {

struct Training {
  Training()
      : a(leaf(1)),
        b(leaf(1)),
        job({{"a", a}, {"b", b}}),
        set(job.registry, job.topology, job.groups, job.options, this, {0, 1}),
        optimizer({{"a", a, 0}, {"b", b, 0}}, descent()) {}

  void micro_batch(const Loss& loss, bool last) {
    set.open_micro_batch(last, /*fused=*/true);
    set.open_window(0, 1);
    set.backward(0, loss, 1);
    REQUIRE(set.end_micro_batch(0, /*failed=*/false) == nullptr);
  }
  WindowSums end() {
    set.close_window(0, {}, /*stop_requested=*/false);
    return set.finish_window(/*fused=*/true);
  }
  Loss loss(double a_gradient, double weight = 1) { return loss_of((a * a_gradient + b).sum(), weight); }

  at::Tensor a;
  at::Tensor b;
  OneReplica job;
  ParameterSet set;
  FlatOptimizer optimizer;
};

}  // namespace

TEST_CASE("a window is open from its first micro-batch to its end", "[window]") {
  Training training;
  auto& set = training.set;
  CHECK_FALSE(set.window_open());
  training.micro_batch(training.loss(2), /*last=*/false);
  CHECK(set.micro_batches() == 1);
  training.micro_batch(training.loss(4), /*last=*/true);
  CHECK(training.end().weight == 2);
  CHECK_FALSE(set.window_open());
  set.step(training.optimizer, {0, 1}, descent(), alone);
  CHECK(is_all(training.a, 1 - 0.5 * 3));

  // One that is dropped leaves nothing to the next.
  training.micro_batch(training.loss(100), /*last=*/false);
  set.drop_window();
  training.micro_batch(training.loss(1), /*last=*/true);
  CHECK(training.end().weight == 1);
  set.step(training.optimizer, {0, 1}, descent(), alone);
  CHECK(is_all(training.a, 1 - 0.5 * 3 - 0.5));
}

TEST_CASE("a window's end tells who failed in it, and where a gradient was not finite", "[window]") {
  Training training;
  auto& set = training.set;
  training.micro_batch(training.loss(2), /*last=*/false);
  set.poison(0, {.type = "Slip", .text = "lost its grip"});
  training.micro_batch(training.loss(2), /*last=*/true);
  const auto failed = training.end();
  REQUIRE(failed.failures.size() == 1);
  CHECK(failed.failures.front().failure.text == "lost its grip");
  CHECK(set.told().failed);
  CHECK_FALSE(set.window_open());

  set.locate_non_finite(true);
  training.micro_batch(training.loss(std::numeric_limits<double>::infinity()), /*last=*/true);
  const auto sums = training.end();
  CHECK_FALSE(sums.finite);
  CHECK(sums.non_finite_at == "parameter 'a' of replica 0");
}

TEST_CASE("losses and sets that nothing can be learned from are refused", "[window]") {
  Training training;
  auto& set = training.set;
  set.open_micro_batch(/*last=*/true, /*fused=*/true);
  set.open_window(0, 1);
  CHECK_THROWS_AS(set.backward(0, Loss(training.a * 2), 1), InvalidArgument);
  CHECK_THROWS_AS(set.backward(0, Loss(at::full({}, 1.0)), 1), InvalidArgument);
  CHECK_THROWS_AS(set.backward(0, Loss(), 1), InvalidArgument);
  set.drop_window();
  CHECK_THROWS_AS(set.connect_servers(training.optimizer, {0, 1}, descent()), InvalidArgument);
  training.a.set_requires_grad(false);
  training.b.set_requires_grad(false);
  CHECK_THROWS_AS(set.open_micro_batch(true, true), InvalidArgument);
}
