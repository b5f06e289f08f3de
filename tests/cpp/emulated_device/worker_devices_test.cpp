// Workers of several devices each, which divide the worker's step among themselves.
#include <ATen/ops/embedding.h>
#include <ATen/ops/linspace.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <algorithm>
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
constexpr int kWindows = 4;

struct Played {
  bool has_peer_access = true;
  StrategyOptions options{};
  int micro_batches = 1;
  std::vector<int> devices{2, 2};  // by worker
  int moved_in = -1;               // a window in which the last replica of worker 1 gets a parameter of gaps
};

Topology topology_of(int rank, const std::vector<int>& devices) {
  auto topology = replicas_each(rank, kTwoWorkers, devices[static_cast<size_t>(rank)]);
  topology.replicas_of_worker = devices;
  topology.num_replicas = devices[0] + devices[1];
  topology.first_replica = topology.first_replica_of(rank);
  const auto most =
      std::vector(static_cast<size_t>(*std::max_element(devices.begin(), devices.end())), c10::Device(c10::kCPU));
  topology.access = access_between(most);
  return topology;
}

/// One worker, as a strategy drives its set.
class WorkerOfDevices {
 public:
  WorkerOfDevices(int rank, const Groups& groups, const Played& played)
      : topology_(topology_of(rank, played.devices)),
        groups_(groups),
        options_(played.options),
        registry_(topology_.devices) {
    const std::vector<int64_t> numels = {3 * kOneTile + 5, 7, 2 * kOneTile, kOneTile + 1};
    ModuleTensors module;
    for (int r = 0; r < topology_.local_replicas(); ++r) {
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
    const Shard shard = options_.shard_optimizer ? Shard{rank, kTwoWorkers} : Shard{};
    optimizer_ = std::make_unique<FlatOptimizer>(flat, step_groups_, shard);
  }

  void play(const Played& played, int window) {
    const std::vector<OptimizerStep> steps{{optimizer_.get(), all_, step_groups_, {}}};
    registry_.follow_moves(/*copies_all=*/true);
    for (int m = 1; m <= played.micro_batches; ++m) {
      const bool last = m == played.micro_batches;
      set_->open_micro_batch(last, /*fused=*/true, steps);
      if (last) set_->agree_on(steps);
      const auto failure = run_threads(topology_.local_replicas(), [&](int r) {
        set_->open_window(r, 1);
        set_->backward(r, loss(r, window), 1);
        if (last && window == played.moved_in && topology_.rank == 1 && r > 0) put_gaps_in(r);
        if (const auto error = set_->end_micro_batch(r, /*failed=*/false)) std::rethrow_exception(error);
        if (last) set_->close_window(r, {}, /*stop_requested=*/false);
      });
      MUSTER_CHECK(failure == "");
    }
    const auto sums = set_->finish_window(/*fused=*/true);
    set_->step(*optimizer_, all_, step_groups_, [](const std::function<void(int)>& work) { work(0); });
    seen.push_back(sums.report.grad_norm().clone());
    for (const int p : all_) seen.push_back(registry_.parameter(0, static_cast<size_t>(p)).detach().clone());
    is_state_divided = false;
    for (size_t p = 0; p < all_.size(); ++p) {
      is_state_divided = is_state_divided || optimizer_->state().entry(p).is_common(0);
    }
  }

  /// Whether the other replicas have what replica 0 has.
  bool are_equal() const {
    bool equal = true;
    for (size_t r = 1; r < topology_.devices.size(); ++r) {
      for (const int p : all_) {
        const auto index = static_cast<size_t>(p);
        equal = equal && registry_.parameter(r, index).equal(registry_.parameter(0, index));
      }
    }
    return equal;
  }

  /// Elements of the first state tensors that this worker has.
  int64_t state_elements() const {
    int64_t elements = 0;
    for (size_t p = 0; p < all_.size(); ++p) {
      const auto& state = optimizer_->state().tensor(p, 0);
      if (state.defined()) elements += state.numel();
    }
    return elements;
  }

  std::vector<at::Tensor> seen;  // after each window
  bool is_state_divided = false;

 private:
  void put_gaps_in(int local_replica) const {
    const auto& parameter = registry_.parameter(static_cast<size_t>(local_replica), 0);
    const auto values = parameter.detach().clone();
    parameter.set_data(at::zeros({values.numel(), 2}).select(1, 0).copy_(values));
  }

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

/// What every worker sees after four windows: the same. `fake`: what replicas communicate over; null: this process's
/// memory.
std::vector<at::Tensor> play(const Played& played, FakeNccl* fake = nullptr) {
  const Apart apart(true);
  play_peer_access(played.has_peer_access);
  const int replicas = played.devices[0] + played.devices[1];
  const auto gradients = comm::make_local(replicas, Seconds(60));
  const auto control = comm::make_local(replicas, Seconds(60));
  const auto cards = comm::make_local(replicas, Seconds(60));
  const auto workers = comm::make_local(kTwoWorkers, Seconds(60));
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const bool has_shards = played.options.shard_optimizer;
  std::array<std::vector<at::Tensor>, kTwoWorkers> seen;
  std::array<int64_t, kTwoWorkers> state_elements{};
  CHECK(run_threads(kTwoWorkers, [&](int rank) {
          const auto topology = topology_of(rank, played.devices);
          Groups groups;
          std::vector<comm::NcclOptions> nccl;
          for (int r = 0; r < topology.local_replicas(); ++r) {
            const auto replica = static_cast<size_t>(topology.first_replica + r);
            groups.gradients.push_back(gradients[replica]);
            groups.control.push_back(control[replica]);
            nccl.emplace_back().control = cards[replica];
          }
          if (fake != nullptr) {
            groups.gradients = comm::nccl::make_communicators(fake->nccl(), fake->device(), *store,
                                                              topology.first_replica, replicas, topology.devices, nccl);
          }
          groups.workers = workers[static_cast<size_t>(rank)];
          groups.buckets = {4 * kOneTile * 4, 4, 0};
          WorkerOfDevices worker(rank, groups, played);
          for (int window = 0; window < kWindows; ++window) worker.play(played, window);
          // Stored to all in the step or broadcast after it, or copied when the next window begins.
          MUSTER_CHECK(worker.are_equal() == (played.has_peer_access || has_shards || topology.devices.size() == 1));
          MUSTER_CHECK(worker.is_state_divided == (played.has_peer_access && topology.devices.size() > 1));
          seen.at(static_cast<size_t>(rank)) = worker.seen;
          state_elements.at(static_cast<size_t>(rank)) = worker.state_elements();
          groups.workers->barrier().wait();
        }) == "");
  constexpr int64_t kElements = 6 * kOneTile + 5 + 7 + 1 + 15;
  for (const auto elements : state_elements) CHECK((elements == kElements) != has_shards);
  if (has_shards) CHECK(state_elements[0] + state_elements[1] == kElements);
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

TEST_CASE("devices of each worker divide its shard, and leave the bits of whole state", "[device]") {
  Played played;
  played.options.shard_optimizer = true;
  SECTION("plainly") {}
  SECTION("clipped, over micro-batches") {
    played.options.clip_norm = 0.5;
    played.options.clip_norm_type = GENERATE(2.0, double{INFINITY});
    played.micro_batches = 2;
  }
  SECTION("of sums that travelled as bf16") { played.options.wire = Wire::bf16; }
  SECTION("where a worker has one device") { played.devices = GENERATE(std::vector{1, 2}, std::vector{3, 1}); }
  SECTION("where a parameter gets gaps in its memory on one replica") { played.moved_in = 2; }
  FakeNccl fake;
  const auto sharded = play(played, &fake);
  CHECK(fake.count("reduce 0") > 0);
  CHECK(fake.count("broadcast 0") > 0);
  SECTION("whatever carries them") { check_same(sharded, play(played)); }
  FakeNccl fake_without;
  auto without = played;
  without.has_peer_access = false;
  check_same(sharded, play(without, &fake_without));
  CHECK(fake_without.count("reduce 0") == 0);
  without.options.shard_optimizer = false;
  check_same(sharded, play(without));
}
