// What is particular to windows whose parameters live on servers; what holds for every end is in window_test.cpp.
#include "window/server_window.h"

#include <ATen/ops/embedding.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>

#include <cmath>

#include "cpp/catch.h"
#include "cpp/window/server_fixtures.h"
#include "muster/error.h"

using namespace muster;
using namespace muster::testing;

namespace {

struct Hosted {
  explicit Hosted(uint32_t staleness)
      : server(staleness),
        w(leaf(1)),
        rows(at::ones({5, 2}).requires_grad_()),
        job({{"w", w}, {"rows", rows}}),
        optimizer({{"w", w, 0}, {"rows", rows, 0}}, descent()),
        window(job.context(), served()) {
    job.build([this](size_t p, const at::Tensor& sum) { window.exchange()->take(p, sum); });
  }
  void connect() { window.connect(optimizer, {0, 1}, descent()); }
  void update(const Tail& tail) { window.update(tail, optimizer, {0, 1}, descent(), alone); }

  OneServer server;
  at::Tensor w;
  at::Tensor rows;
  OneReplica job;
  FlatOptimizer optimizer;
  ServerWindow window;

 private:
  const ServerJob& served() { return job.groups.servers.emplace(server.job()); }
};

}  // namespace

TEST_CASE("servers step what had a gradient, and hooks see none", "[window]") {
  Hosted set(GENERATE(uint32_t{0}, server::kAnyStaleness));
  CHECK(set.window.exchange() == nullptr);
  set.connect();
  CHECK_FALSE(set.window.joining().watches());
  const auto ended = set.job.play(set.window, loss_of((set.w * 3).sum(), 5));
  CHECK(ended.sums.grad_norm == Approx(6));
  bool was_called = false;
  CHECK(set.window.leave_means(ended.tail, [&] { was_called = true; }) != nullptr);
  CHECK(was_called);
  CHECK_FALSE(set.w.grad().defined());
  set.update(ended.tail);
  CHECK(is_all(set.w, 1 - 0.5 * 3));
  CHECK(is_all(set.rows, 1));
}

TEST_CASE("what nobody used in a window adds nothing to its norm, whatever it was before", "[window]") {
  Hosted set(GENERATE(uint32_t{0}, server::kAnyStaleness));
  set.connect();
  for (int window = 0; window < 2; ++window) {
    auto ended = set.job.play(set.window, loss_of((set.w * 3).sum()));
    CHECK(ended.sums.grad_norm == Approx(6));
    set.update(ended.tail);
    ended = set.job.play(set.window, loss_of((set.rows * 2).sum()));
    CHECK(ended.sums.grad_norm == Approx(std::sqrt(40.0)));
    set.update(ended.tail);
  }
}

TEST_CASE("rows of a dense parameter are refused, and the next window goes on", "[window]") {
  Hosted set(GENERATE(uint32_t{0}, server::kAnyStaleness));
  set.connect();
  const auto looked_up = at::embedding(set.rows, at::tensor({3, 1}), -1, false, /*sparse=*/true);
  CHECK_THROWS_AS(set.job.play(set.window, loss_of(looked_up.sum())), InvalidArgument);
  const auto ended = set.job.play(set.window, loss_of((set.w * 3).sum()));
  set.update(ended.tail);
  CHECK(is_all(set.w, 1 - 0.5 * 3));
  CHECK(is_all(set.rows, 1));
}

TEST_CASE("one optimizer steps all parameters on servers", "[window]") {
  Hosted set(0);
  FlatOptimizer other({{"w", set.w, 0}}, descent());
  CHECK_THROWS_AS(set.window.connect(other, {0}, descent()), InvalidArgument);
}
