#include "window/divided_update.h"

#include <utility>

#include "comm/peer_memory.h"
#include "core/heap.h"
#include "optimizer/own_memory.h"

namespace muster {

namespace {

// Up to so many elements are stepped faster by one thread than others are woken.
constexpr int64_t kAloneElements = 1 << 17;

}  // namespace

bool divides_steps(const Topology& topology, const Groups& groups, const StrategyOptions& options) {
  return options.fuse && !options.shard_optimizer && topology.num_replicas > 1 && !groups.servers &&
         !is_streamed(topology.devices.front()) && OwnerReduction::is_possible(*groups.gradients.front());
}

void DividedUpdate::bring_back() {
  if (home_) home_->bring_back();
}

// Peers may be storing what they own into parameters that have a gradient.
void DividedUpdate::place_in_shared_memory(const Tail& tail) {
  const auto& sums = context_.sums;
  std::vector<at::Tensor> trained;
  for (const int p : sums.trainable()) trained.push_back(context_.registry.parameter(0, static_cast<size_t>(p)));
  if (!home_ || !home_->fits(trained)) {
    std::vector<std::vector<at::Tensor>> by_replica{trained};
    for (size_t r = 1; r < sums.num_engines(); ++r) {
      auto& others = by_replica.emplace_back();
      for (const int p : sums.trainable()) others.push_back(context_.registry.parameter(r, static_cast<size_t>(p)));
    }
    auto home = std::make_unique<ParameterHome>(by_replica, context_.groups.gradients);
    const bool is_first = home_ == nullptr;
    if (home_) home_->leave();
    home_ = std::move(home);
    if (is_first) return_freed_memory();  // where the parameters were
    return;
  }
  home_->bring_back([&](size_t p) -> std::vector<Run> {
    if (!sums.sum_of(tail, p).defined()) return {{0, trained[p].numel()}};
    std::vector<Run> runs;
    for (size_t r = 0; r < sums.num_engines(); ++r) runs.push_back(sums.owned_run(p, r));
    return runs;
  });
}

void DividedUpdate::step(FlatOptimizer& optimizer, const Tail& tail, const std::vector<FlatGradient>& means,
                         const std::vector<int>& parameters, const FlatGroups& groups,
                         const kernels::StepScalars& scalars, const OnReplicas& on_replicas) {
  const auto& sums = context_.sums;
  const auto& gradients = context_.groups.gradients;
  const bool crosses_processes = context_.topology.num_workers > 1;
  DividedStep divided;
  for (size_t r = 0; r < sums.num_engines(); ++r) {
    StepShare share;
    share.gradients = sums.go_to_owners() && r > 0 ? sums.gradients_of(tail, parameters, r) : means;
    for (const int index : parameters) {
      const int p = sums.index_of(index);
      share.runs.push_back(p < 0 ? Run{} : sums.owned_run(static_cast<size_t>(p), r));
    }
    divided.shares.push_back(std::move(share));
  }
  if (crosses_processes) {
    place_in_shared_memory(tail);
    divided.displacements = home_->displacements();
    const int64_t bytes = optimizer.common_bytes(divided, groups);
    if (bytes > 0) {
      const auto memory = gradients.front()->peer_memory()->allocate_common(bytes);
      std::erase_if(common_states_, [](const auto& noted) { return noted.expired(); });
      for (const auto& state : optimizer.share_state(divided, groups, memory)) {
        common_states_.emplace_back(state.getIntrusivePtr());
      }
    }
  }
  const auto is_large = [&] {
    int64_t elements = 0;
    for (const int index : parameters) elements += context_.registry.parameter(0, static_cast<size_t>(index)).numel();
    return elements > kAloneElements;
  };
  auto plan = optimizer.begin(divided, groups, &scalars, /*keep=*/false);
  if (!crosses_processes && !is_large()) {
    for (size_t share = 0; share < plan.num_shares(); ++share) plan.run(share);
  } else {
    on_replicas([&](int local_replica) {
      const auto r = static_cast<size_t>(local_replica);
      if (!crosses_processes) return plan.run(r);
      auto& memory = *gradients[r]->peer_memory();
      memory.begin_stores();
      plan.run(r);
      gradients[r]->barrier().wait();
      memory.end_stores();
    });
  }
  plan.finish();
}

void DividedUpdate::leave_memory() {
  if (home_) home_->leave();
  for (const auto& noted : std::exchange(common_states_, {})) {
    if (auto state = noted.lock()) give_own_memory(at::Tensor(std::move(state)));
  }
}

}  // namespace muster
