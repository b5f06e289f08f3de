// Losses and metrics that the host adds up.
#include "window/host_numbers.h"

#include <cmath>
#include <limits>

#include "cpp/catch.h"
#include "cpp/window/fixtures.h"
#include "muster/error.h"

using namespace muster;
using namespace muster::testing;

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

NotedPart note(HostNumbers& numbers, int replica, double value, double weight, double metric = 0) {
  Loss loss = loss_of(at::scalar_tensor(value, at::kDouble), weight);
  loss.metrics["m"] = at::scalar_tensor(metric, at::kDouble);
  ReplicaPart part;
  part.local_replica = replica;
  part.loss = &loss;
  return numbers.note(part);
}

Tail sum_of_tails(const HostNumbers& numbers, size_t replicas) {
  const auto sum = Tail::make(static_cast<int>(replicas), 0, 0, 0);
  for (size_t r = 0; r < replicas; ++r) {
    const auto tail = Tail::make(static_cast<int>(replicas), 0, 0, 0);
    numbers.fill(tail, r);
    sum.tensor.add_(tail.tensor);
    sum[Tail::contributions] += numbers.losses(r).contributions;
  }
  return sum;
}

}  // namespace

TEST_CASE("losses and metrics are means by weight, over all replicas' texts", "[window]") {
  HostNumbers numbers(2, {});
  numbers.open();
  note(numbers, 0, 1, 1, 0.1);
  note(numbers, 1, 5, 3, 0.3);
  CHECK(numbers.so_far().weight == 4);
  CHECK(numbers.so_far().loss == 4);
  CHECK(numbers.so_far().metrics.at("m") == Approx(0.25));
  numbers.set_metric_texts(0, {numbers.metric_text(0), numbers.metric_text(1)});
  const auto tail = sum_of_tails(numbers, 2);
  WindowSums sums;
  sums.weight = tail[Tail::weight];
  numbers.read(tail, sums);
  CHECK(sums.loss == 4);
  CHECK(sums.metrics.at("m") == (0.1 + 3 * 0.3) / 4);  // to the last bit
  numbers.open();
  CHECK(numbers.so_far().weight == 0);
}

TEST_CASE("a part that weighs nothing leaves no trace, whatever its numbers are", "[window]") {
  HostNumbers numbers(1, {});
  numbers.open();
  note(numbers, 0, 2, 1, 7);
  const auto part = note(numbers, 0, kNan, 0, kNan);
  CHECK_FALSE(part.contributes);
  CHECK(part.seed.item<double>() == 0);
  CHECK(numbers.losses(0).contributions == 1);
  CHECK(numbers.so_far().loss == 2);
  CHECK(numbers.so_far().metrics.at("m") == 7);
  CHECK_THROWS_AS(note(numbers, 0, 1, -1), InvalidArgument);
  CHECK_THROWS_AS(note(numbers, 0, 1, kNan), InvalidArgument);
}

TEST_CASE("the divisor takes out what seeds and factors put in", "[window]") {
  StrategyOptions options;
  options.loss_scale = LossScale{.init = 8, .growth = 2, .backoff = 0.5, .interval = 1};
  HostNumbers numbers(1, options);
  numbers.open();
  numbers.set_unit(0, 2);
  double sum = 0;  // of gradients of 1
  for (const double weight : {1.0, 5.0}) {
    const auto part = note(numbers, 0, 1, weight);
    sum += part.seed.item<double>() * part.factor;
  }
  numbers.take_unit();
  const auto tail = sum_of_tails(numbers, 1);
  CHECK(sum / numbers.divisor(tail) == 1);
  tail[Tail::sum_losses] = 1;
  CHECK(numbers.divisor(tail) == 8);
  numbers.end(tail, /*finite=*/false);
  CHECK(numbers.scale().get().scale == 4);
}

TEST_CASE("a metric's name is a line", "[window]") {
  HostNumbers numbers(1, {});
  numbers.open();
  Loss loss = loss_of(at::scalar_tensor(1.0, at::kDouble), 1);
  loss.metrics["acc\n"] = at::scalar_tensor(1.0, at::kDouble);
  ReplicaPart part;
  part.loss = &loss;
  CHECK_THROWS_WITH(numbers.note(part), ContainsSubstring("line break"));
}
