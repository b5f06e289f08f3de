// Workers of several devices each, which divide the worker's step among themselves.
#include <ATen/ops/embedding.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>

#include <array>
#include <functional>

#include "cpp/catch.h"
#include "cpp/emulated_device/device_job.h"
#include "cpp/emulated_device/played_link.h"
#include "cpp/window/fixtures.h"
#include "device/peer_access.h"
#include "support/run_ranks.h"
#include "window/parameter_set.h"

using namespace muster;
using namespace muster::testing;

namespace {

constexpr auto kOneTile = static_cast<int64_t>(kernels::kTile);
constexpr int kTwoWorkers = 2;
constexpr int kDevices = 2;  // of each

struct Played {
  bool has_peer_access = true;
  StrategyOptions options{};
  int micro_batches = 1;
};

/// One worker, as a strategy drives its set.
class WorkerOfDevices {
 public:
  WorkerOfDevices(int rank, const Groups& groups, const StrategyOptions& options)
      : topology_(replicas_each(rank, kTwoWorkers, kDevices)),
        groups_(groups),
        options_(options),
        registry_(topology_.devices) {
    const std::vector<int64_t> numels = {3 * kOneTile + 5, 7, 2 * kOneTile, kOneTile + 1};
    ModuleTensors module;
    for (int r = 0; r < kDevices; ++r) {
      auto& named = module.parameters.emplace_back();
      for (size_t p = 0; p < numels.size(); ++p) named.emplace_back("p" + std::to_string(p), leaf(0.5, numels[p]));
      named.emplace_back("rows", at::ones({5, 3}).requires_grad_());
      module.buffers.emplace_back();
    }
    std::vector<FlatParameter> flat;
    for (size_t p = 0; p <= numels.size(); ++p) {
      flat.push_back({module.parameters[0][p].first, module.parameters[0][p].second, 0});
      all_.push_back(static_cast<int>(p));
    }
    registry_.add(std::move(module), *groups_.workers);
    set_ = std::make_unique<ParameterSet>(registry_, topology_, groups_, options_, this, all_);
    step_groups_ = std::vector<kernels::SgdGroup>{{0.125, 0.5, 0, 0, false, false}};
    optimizer_ = std::make_unique<FlatOptimizer>(flat, step_groups_);
  }

  void play(const Played& played, int window) {
    const std::vector<OptimizerStep> steps{{optimizer_.get(), all_, step_groups_, {}}};
    registry_.follow_moves(/*copies_all=*/true);
    for (int m = 1; m <= played.micro_batches; ++m) {
      const bool last = m == played.micro_batches;
      set_->open_micro_batch(last, /*fused=*/true, steps);
      if (last) set_->agree_on(steps);
      const auto failure = run_threads(kDevices, [&](int r) {
        set_->open_window(r, 1);
        set_->backward(r, loss(r, window), 1);
        if (const auto error = set_->end_micro_batch(r, /*failed=*/false)) std::rethrow_exception(error);
        if (last) set_->close_window(r, {}, /*stop_requested=*/false);
      });
      MUSTER_CHECK(failure == "");
    }
    const auto sums = set_->finish_window(/*fused=*/true);
    set_->step(*optimizer_, all_, step_groups_, [](const std::function<void(int)>& work) { work(0); });
    seen.push_back(sums.report.grad_norm().clone());
    for (const int p : all_) seen.push_back(registry_.parameter(0, static_cast<size_t>(p)).detach().clone());
    is_state_divided = optimizer_->state().entry(0).is_common(0);
  }

  /// Whether the other replica has what replica 0 has.
  bool are_equal() const {
    bool equal = true;
    for (const int p : all_) {
      const auto index = static_cast<size_t>(p);
      equal = equal && registry_.parameter(1, index).equal(registry_.parameter(0, index));
    }
    return equal;
  }

  std::vector<at::Tensor> seen;  // after each window
  bool is_state_divided = false;

 private:
  Loss loss(int local_replica, int window) const {
    const int replica = topology_.first_replica + local_replica;
    const auto r = static_cast<size_t>(local_replica);
    at::Tensor sum = at::zeros({});
    for (size_t p = 0; p + 1 < all_.size(); ++p) {
      if (static_cast<int>(p) == 1 + window) continue;  // each window leaves another one out
      const auto& parameter = registry_.parameter(r, p);
      sum = sum + (parameter * at::linspace(-1, 1 + replica, parameter.numel(), at::kFloat)).sum();
    }
    const auto rows = at::tensor({3, replica}, at::kLong);
    return sum + at::embedding(registry_.parameter(r, all_.size() - 1), rows, -1, false, /*sparse=*/true).sum();
  }

  Topology topology_;
  Groups groups_;
  StrategyOptions options_;
  ParameterRegistry registry_;
  std::vector<int> all_;
  std::unique_ptr<ParameterSet> set_;
  FlatGroups step_groups_;
  std::unique_ptr<FlatOptimizer> optimizer_;
};

/// What every worker sees after three windows: the same.
std::vector<at::Tensor> play(const Played& played) {
  const Apart apart(true);
  play_peer_access(played.has_peer_access);
  const auto gradients = comm::make_local(kTwoWorkers * kDevices, Seconds(60));
  const auto control = comm::make_local(kTwoWorkers * kDevices, Seconds(60));
  const auto workers = comm::make_local(kTwoWorkers, Seconds(60));
  std::array<std::vector<at::Tensor>, kTwoWorkers> seen;
  CHECK(run_threads(kTwoWorkers, [&](int rank) {
          Groups groups;
          for (int r = 0; r < kDevices; ++r) {
            const auto replica = static_cast<size_t>(rank * kDevices + r);
            groups.gradients.push_back(gradients[replica]);
            groups.control.push_back(control[replica]);
          }
          groups.workers = workers[static_cast<size_t>(rank)];
          groups.buckets = {4 * kOneTile * 4, 4, 0};
          WorkerOfDevices worker(rank, groups, played.options);
          for (int window = 0; window < 3; ++window) worker.play(played, window);
          // Stored to both in the step, or copied when the next window begins.
          MUSTER_CHECK(worker.are_equal() == played.has_peer_access);
          MUSTER_CHECK(worker.is_state_divided == played.has_peer_access);
          seen.at(static_cast<size_t>(rank)) = worker.seen;
          groups.workers->barrier().wait();
        }) == "");
  play_peer_access(true);
  check_same(seen[1], seen[0]);
  return seen[0];
}

}  // namespace

TEST_CASE("devices of each worker divide its step, and leave the bits of the first one's", "[device]") {
  Played played;
  SECTION("plainly") {}
  SECTION("clipped, over micro-batches") {
    played.options.clip_norm = 0.5;
    played.micro_batches = 2;
  }
  SECTION("of sums that travelled as bf16") { played.options.wire = Wire::bf16; }
  const auto divided = play(played);
  played.has_peer_access = false;
  check_same(divided, play(played));
}
