// Workers of one device each that keep a shard of the optimizer's state: sums of gradients go to those who step.
#include <ATen/ops/embedding.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
#include <array>
#include <functional>
#include <limits>

#include "cpp/catch.h"
#include "cpp/emulated_device/device_job.h"
#include "cpp/window/fixtures.h"
#include "muster/error.h"
#include "support/fake_nccl.h"
#include "support/run_ranks.h"
#include "window/parameter_set.h"

using namespace muster;
using namespace muster::testing;

namespace {

constexpr auto kTile = static_cast<int64_t>(kernels::kTile);
constexpr int kWorkers = 3;

struct Case {
  StrategyOptions options{};
  int micro_batches = 1;
  bool overflows = false;  // of the second window
  bool has_rows = true;
  int reversed_from = -1;  // a window, from which on all list their parameters in another order
};

/// One worker of one replica, as a strategy drives its set.
class Worker {
 public:
  Worker(int rank, const Groups& groups, const StrategyOptions& options)
      : topology_(one_replica_each(rank, kWorkers)), groups_(groups), options_(options), registry_(topology_.devices) {
    const std::vector<int64_t> numels = {3 * kTile + 5, 7, 2 * kTile, 4, kTile + 1, 2 * kTile};
    NamedTensors named;
    for (size_t p = 0; p < numels.size(); ++p) named.emplace_back("p" + std::to_string(p), leaf(0.5, numels[p]));
    rows_ = at::ones({5, 3}).requires_grad_();
    named.emplace_back("rows", rows_);
    for (size_t p = 0; p < named.size(); ++p) {
      flat_.push_back({named[p].first, named[p].second, 0});
      all_.push_back(static_cast<int>(p));
      parameters_.push_back(named[p].second);
    }
    registry_.add({{named}, {{}}}, *groups_.workers);
    set_ = std::make_unique<ParameterSet>(registry_, topology_, groups_, options_, this, all_);
    step_groups_ = std::vector<kernels::SgdGroup>{{0.125, 0, 0, 0, false, false}};
    optimizer_ = std::make_unique<FlatOptimizer>(flat_, step_groups_, Shard{rank, kWorkers});
  }

  /// An optimizer of the same parameters in another order, and back to the first one.
  void reverse() {
    std::reverse(flat_.begin(), flat_.end());
    std::reverse(all_.begin(), all_.end());
    std::swap(optimizer_, other_);
    if (!optimizer_) {
      optimizer_ = std::make_unique<FlatOptimizer>(flat_, step_groups_, Shard{topology_.rank, kWorkers});
    }
  }

  void begin(const Case& played, int window) {
    for (int m = 1; m <= played.micro_batches; ++m) {
      const bool last = m == played.micro_batches;
      const std::vector<OptimizerStep> steps{{optimizer_.get(), all_, step_groups_, {}}};
      set_->open_micro_batch(last, /*fused=*/true, steps);
      if (last) set_->agree_on(steps);
      set_->open_window(0, 1);
      set_->backward(0, loss(played, window), 1);
      if (const auto error = set_->end_micro_batch(0, /*failed=*/false)) std::rethrow_exception(error);
      if (last) set_->close_window(0, {}, /*stop_requested=*/false);
    }
  }
  WindowSums end() { return set_->finish_window(/*fused=*/true); }

  void play(const Case& played, int window, std::vector<at::Tensor>& seen) {
    if (window == played.reversed_from) reverse();
    begin(played, window);
    const auto sums = end();
    set_->step(*optimizer_, all_, step_groups_, [](const std::function<void(int)>& work) { work(0); });
    for (const auto& parameter : parameters_) seen.push_back(parameter.detach().clone());
    seen.push_back(sums.report.grad_norm().nan_to_num(-1));  // NaN is equal to nothing
    seen.push_back(sums.on_device->skipped.clone());
  }

 private:
  Loss loss(const Case& played, int window) {
    at::Tensor sum = at::zeros({});
    for (size_t p = 0; p + 1 < parameters_.size(); ++p) {
      if (static_cast<int>(p) == 2 + window) continue;  // each window leaves another one out
      const auto slopes = at::linspace(-1, 1 + topology_.rank, parameters_[p].numel(), at::kFloat);
      sum = sum + (parameters_[p] * slopes).sum();
    }
    if (played.has_rows) {
      const auto found = at::embedding(rows_, at::tensor({3, 3, topology_.rank}), -1, false, /*sparse=*/true);
      sum = sum + found.sum();
    }
    if (played.overflows && window == 1 && topology_.rank == 1) sum = sum * std::numeric_limits<double>::infinity();
    return sum;
  }

  Topology topology_;
  Groups groups_;
  StrategyOptions options_;
  ParameterRegistry registry_;
  at::Tensor rows_;
  std::vector<at::Tensor> parameters_;
  std::vector<int> all_;
  std::vector<FlatParameter> flat_;
  std::unique_ptr<ParameterSet> set_;
  FlatGroups step_groups_;
  std::unique_ptr<FlatOptimizer> optimizer_;
  std::unique_ptr<FlatOptimizer> other_;
};

/// Runs `work` with the groups of each worker.
std::string on_workers(FakeNccl& fake, const std::function<void(int rank, const Groups& groups)>& work) {
  play_streams_on_cpu(true);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto workers = comm::make_local(kWorkers, Seconds(60));
  const auto control = comm::make_local(kWorkers, Seconds(60));
  const auto cards = comm::make_local(kWorkers, Seconds(60));
  return run_threads(kWorkers, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    Groups groups;
    comm::NcclOptions nccl;
    nccl.control = cards[r];
    groups.gradients = comm::nccl::make_communicators(fake.nccl(), fake.device(), *store, rank, kWorkers,
                                                      {c10::Device(c10::kCPU)}, {nccl});
    groups.control = {control[r]};
    groups.workers = workers[r];
    groups.buckets = {4 * kTile * 4, 4, 0};
    work(rank, groups);
    groups.workers->barrier().wait();
  });
}

/// What every worker sees after four windows: the same.
std::vector<at::Tensor> play(FakeNccl& fake, Case played, bool keeps_whole_sums) {
  played.options.shard_optimizer = true;
  played.options.keep_gradients = keeps_whole_sums;
  std::array<std::vector<at::Tensor>, kWorkers> seen;
  CHECK(on_workers(fake, [&](int rank, const Groups& groups) {
          Worker worker(rank, groups, played.options);
          for (int window = 0; window < 4; ++window) worker.play(played, window, seen.at(static_cast<size_t>(rank)));
        }) == "");
  for (const auto& of_worker : seen) check_same(of_worker, seen[0]);
  return seen[0];
}

}  // namespace

TEST_CASE("sums that go to shards alone leave the bits of whole sums", "[device]") {
  Case played;
  SECTION("plainly") {}
  SECTION("clipped by the norm, over micro-batches") {
    played.options.clip_norm = 0.5;
    played.options.clip_norm_type = GENERATE(2.0, 1.0, double{INFINITY});
    played.micro_batches = 2;
  }
  SECTION("as bf16") { played.options.wire = Wire::bf16; }
  SECTION("as bf16, over micro-batches") {
    played.options.wire = Wire::bf16;
    played.micro_batches = 2;
  }
  SECTION("of a window that overflows on one worker") { played.overflows = true; }
  SECTION("without rows") { played.has_rows = false; }
  SECTION("of parameters that all list in another order later") { played.reversed_from = 2; }
  FakeNccl fake;
  FakeNccl whole;
  const auto sharded = play(fake, played, false);
  check_same(sharded, play(whole, played, true));
  if (!played.overflows) CHECK(sharded.front().ne(0.5).sum().item<int64_t>() > 3 * kTile - 100);
  // Whoever keeps gradients gets whole sums; else each bucket goes to its owners, once workers agreed who they are.
  CHECK(whole.count("reduce 0") == 0);
  CHECK(fake.count("reduce 0") >= 9);
  CHECK(fake.count("all_reduce 0") < whole.count("all_reduce 0"));
}

TEST_CASE("a worker that lists its parameters in another order ends no group", "[device]") {
  FakeNccl fake;
  StrategyOptions options;
  options.shard_optimizer = true;
  std::array<std::vector<at::Tensor>, kWorkers> seen;
  CHECK(on_workers(fake, [&](int rank, const Groups& groups) {
          Worker worker(rank, groups, options);
          auto& own = seen.at(static_cast<size_t>(rank));
          worker.play({}, 0, own);
          worker.play({}, 1, own);
          if (rank == 1) worker.reverse();
          worker.begin({}, 2);
          MUSTER_CHECK(contains(message_of<LayoutMismatch>([&] { worker.end(); }), "would make different steps"));
          if (rank == 1) worker.reverse();
          worker.play({}, 3, own);
        }) == "");
  for (const auto& of_worker : seen) check_same(of_worker, seen[0]);
  CHECK(fake.count("reduce 0") > 0);
}
