// Steps that workers divide: each steps what it owns, in everybody's memory.
#include "window/divided_update.h"

#include <algorithm>

#include "cpp/catch.h"
#include "cpp/window/fixtures.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::testing;

TEST_CASE("steps are divided where replicas see one another's memory and may", "[window]") {
  const auto local = comm::make_local(2, Seconds(60));
  Groups groups;
  groups.gradients = {local.front()};
  const auto topology = one_replica_each(0, 2);
  CHECK(divides_steps(topology, groups, {}));
  CHECK_FALSE(divides_steps(one_replica_each(0, 1), groups, {}));
  StrategyOptions sharded;
  sharded.shard_optimizer = true;
  CHECK_FALSE(divides_steps(topology, groups, sharded));
  StrategyOptions unfused;
  unfused.fuse = false;
  CHECK_FALSE(divides_steps(topology, groups, unfused));
  groups.gradients = {comm::make_single()};
  CHECK_FALSE(divides_steps(topology, groups, {}));
}

namespace {

// One worker's part of a job that descends from ones.
struct DividedDescent {
  static constexpr int64_t kNumel = 3 * static_cast<int64_t>(kernels::kTile) + 5;

  explicit DividedDescent(const comm::CommunicatorPtr& group) : job({{"w", w}}, {}, group) {
    job.build();
    job.sums.set_to_owners(true);
  }

  // Of two workers with the losses of their ranks; leaves 1 - 0.5 * (1 + 2) / 2.
  void step(int rank) {
    const auto tail = job.accumulate((w * (rank + 1)).sum());
    divided.step(optimizer, tail, job.sums.gradients_of(tail, {0}, 0), {0}, descent(), scalars_with(2), alone);
  }

  at::Tensor w = leaf(1, kNumel);
  OneReplica job;
  FlatOptimizer optimizer{{{"w", w, 0}}, descent()};
  DividedUpdate divided{job.context()};
};

}  // namespace

TEST_CASE("each element is stepped once, and every worker has it", "[window]") {
  const auto local = comm::make_local(2, Seconds(60));
  CHECK(run_threads(2, [&](int rank) {
          const auto& group = local[static_cast<size_t>(rank)];
          DividedDescent worker(group);
          const auto& w = worker.w;
          worker.step(rank);
          const auto& own = worker.job.sums.owned_run(0, 0);
          MUSTER_CHECK(own.count > 0 && own.count < DividedDescent::kNumel);
          MUSTER_CHECK(is_all(w, 1 - 0.5 * (1 + 2) / 2));
          group->barrier().wait();

          // A parameter whose memory was replaced goes home with its values.
          const auto* const home = w.const_data_ptr();
          w.set_data(at::full({DividedDescent::kNumel}, 7.0F));
          worker.divided.bring_back();
          MUSTER_CHECK(w.const_data_ptr() == home);
          MUSTER_CHECK(is_all(w, 7));

          worker.divided.leave_memory();
          MUSTER_CHECK(w.const_data_ptr() != home);
          MUSTER_CHECK(is_all(w, 7));
          group->barrier().wait();
        }).empty());
}

TEST_CASE("what lies in a parameter's memory moves with it", "[window]") {
  const auto local = comm::make_local(2, Seconds(60));
  CHECK(run_threads(2, [&](int rank) {
          const auto& group = local[static_cast<size_t>(rank)];
          DividedDescent worker(group);
          const auto& w = worker.w;
          const auto kept = w.detach();
          const auto rows = kept.view({1, DividedDescent::kNumel});
          // As a NumPy array holds it: by its address, as long as a tensor lives.
          const float* const address = kept.const_data_ptr<float>();
          worker.step(rank);
          MUSTER_CHECK(is_all(w, 1 - 0.5 * (1 + 2) / 2));
          MUSTER_CHECK(kept.const_data_ptr() == w.const_data_ptr() && kept.const_data_ptr() != address);
          MUSTER_CHECK(rows.const_data_ptr() == w.const_data_ptr());
          MUSTER_CHECK(std::all_of(address, address + DividedDescent::kNumel, [](float value) { return value == 1; }));
          group->barrier().wait();

          worker.divided.leave_memory();
          w.set_requires_grad(false).fill_(3);
          MUSTER_CHECK(is_all(kept, 3));
          group->barrier().wait();
        }).empty());
}
