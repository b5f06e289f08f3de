// What workers compare before they step.
#include "window/agreement.h"

#include <ATen/ops/ones.h>

#include <cmath>

#include "cpp/catch.h"
#include "cpp/window/fixtures.h"
#include "muster/error.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::testing;

namespace {

struct Stepping {
  explicit Stepping(comm::CommunicatorPtr group = comm::make_single())
      : a(leaf(1)),
        b(leaf(2)),
        job({{"a", a}, {"b", b}}, {}, std::move(group)),
        optimizer({{"a", a, 0}, {"b", b, 0}}, adam(0.1)) {}

  static FlatGroups adam(double lr) {
    return std::vector<kernels::AdamGroup>{{.lr = lr,
                                            .beta1 = 0.9,
                                            .beta2 = 0.99,
                                            .eps = 1e-8,
                                            .weight_decay = 0,
                                            .decoupled = false,
                                            .amsgrad = false,
                                            .maximize = false}};
  }

  Agreement agreement(double lr = 0.1, const std::vector<int>& written = {}, bool shares_state = true) {
    return {
        job.registry, {{.flat = &optimizer, .parameters = {0, 1}, .groups = adam(lr)}}, scale, written, shares_state};
  }

  at::Tensor a;
  at::Tensor b;
  OneReplica job;
  FlatOptimizer optimizer;
  kernels::LossScaleState scale{.scale = 1, .growth_tracker = 0};
};

std::string on_two(const std::function<void(Stepping& worker, comm::Communicator& group, int rank)>& body) {
  const auto groups = comm::make_local(2, Seconds(60));
  return run_threads(2, [&](int rank) {
    const auto& group = groups[static_cast<size_t>(rank)];
    Stepping worker(group);
    body(worker, *group, rank);
  });
}

}  // namespace

TEST_CASE("a digest tells hyperparameters and counts of steps apart, and is exact in fp64", "[window]") {
  Stepping one;
  Stepping other;
  const double digest = one.agreement().digest();
  CHECK(digest == other.agreement().digest());
  CHECK(digest == std::floor(digest));
  CHECK(digest < std::ldexp(1.0, 52));
  CHECK(digest != other.agreement(0.2).digest());
  other.optimizer.state().set_step_count(1, 3);
  CHECK(digest != other.agreement().digest());
  one.scale.scale = 2;
  CHECK(digest != one.agreement().digest());
  one.scale = {.scale = 1, .growth_tracker = 1};
  CHECK(digest != one.agreement().digest());
  CHECK(Agreement().digest() == 0);
}

TEST_CASE("workers that differ hear of the first difference", "[window]") {
  CHECK(on_two([](Stepping& worker, comm::Communicator& group, int rank) {
          const auto agreement = worker.agreement(rank == 0 ? 0.5 : 0.25);
          const auto message = message_of<LayoutMismatch>([&] { agreement.throw_difference(group); });
          MUSTER_CHECK(contains(message, "rank 0 has lr 0.5 in group 0, rank 1 has lr 0.25 in group 0"));
          worker.scale.scale = rank == 0 ? 512 : 65536;
          const auto scaled = message_of<LayoutMismatch>([&] { worker.agreement().throw_difference(group); });
          MUSTER_CHECK(contains(scaled, "rank 0 has loss scale 512 after 0 finite steps, rank 1 has loss scale 65536"));
        }).empty());
}

TEST_CASE("values that a worker wrote are compared, and named with who wrote them", "[window]") {
  CHECK(on_two([](Stepping& worker, comm::Communicator& group, int rank) {
          const auto agreement = worker.agreement(0.1, rank == 1 ? std::vector<int>{1} : std::vector<int>());
          MUSTER_CHECK(agreement.has_writes() == (rank == 1));
          MUSTER_CHECK(agreement.compare_values(group) == std::vector<int>{1});
          worker.b.detach().fill_(rank);
          const auto message = message_of<LayoutMismatch>([&] { agreement.compare_values(group); });
          MUSTER_CHECK(contains(message, "parameter 'b' was written since the last step, by rank 1,"));
        }).empty());
}

TEST_CASE("loaded state is a write where workers step for one another", "[window]") {
  CHECK(on_two([](Stepping& worker, comm::Communicator& group, int rank) {
          worker.optimizer.state().set(0, 0, at::ones({4}) * rank);
          const auto agreement = worker.agreement();
          MUSTER_CHECK(agreement.has_writes());
          const auto message = message_of<LayoutMismatch>([&] { agreement.compare_values(group); });
          MUSTER_CHECK(contains(message, "the optimizer's state of parameter 'a'"));
        }).empty());
}

TEST_CASE("state that each worker has for itself is compared where it was given to one", "[window]") {
  CHECK(on_two([](Stepping& worker, comm::Communicator& group, int rank) {
          const auto now = [&] { return worker.agreement(0.1, {}, /*shares_state=*/false); };
          auto& state = worker.optimizer.state();
          MUSTER_CHECK(!now().has_writes());
          for (size_t which = 0; which < 2; ++which) state.set(0, which, at::ones({4}));
          state.set_step_count(0, 3);
          const double digest = now().digest();
          MUSTER_CHECK(now().has_writes());
          MUSTER_CHECK(now().compare_values(group).empty());
          now().note_agreed();
          MUSTER_CHECK(!now().has_writes());

          if (rank == 1) state.set(0, 0, at::ones({4}) * 2);
          MUSTER_CHECK(now().has_writes() == (rank == 1));
          MUSTER_CHECK(now().digest() == digest);  // values alone tell
          const auto message = message_of<LayoutMismatch>([&] { now().compare_values(group); });
          MUSTER_CHECK(
              contains(message, "the optimizer's state of parameter 'a' was written since the last step, by rank 1"));
          if (rank == 1) state.set(0, 0, at::ones({4}));
          MUSTER_CHECK(now().compare_values(group).empty());
        }).empty());
}
