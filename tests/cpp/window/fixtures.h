// A window's surroundings without a strategy: a registry, a group, and the gradient sums of one replica.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "core/replica_context.h"
#include "job/topology.h"
#include "muster/options.h"
#include "muster/step.h"
#include "optimizer/flat_optimizer.h"
#include "support/topology.h"
#include "window/gradient_sums.h"
#include "window/parameter_registry.h"
#include "window/window.h"
#include "window/window_context.h"

namespace muster::testing {

/// Plain gradient descent, in numbers that fp32 has exactly.
inline FlatGroups descent(double lr = 0.5) {
  return std::vector<kernels::SgdGroup>{
      {.lr = lr, .momentum = 0, .dampening = 0, .weight_decay = 0, .nesterov = false, .maximize = false}};
}

inline kernels::StepScalars scalars_with(double divisor) {
  return {.divisor = divisor, .clip = 1, .norm = 0, .unit = 1, .finite = 1, .dropped = 0};
}

inline at::Tensor leaf(double value, int64_t numel = 4, at::ScalarType dtype = at::kFloat) {
  return at::full({numel}, value, dtype).requires_grad_();
}

inline bool is_all(const at::Tensor& tensor, double value) { return tensor.eq(value).all().item<bool>(); }

inline Loss loss_of(const at::Tensor& value, double weight = 1) {
  Loss loss(value);
  loss.weight = at::scalar_tensor(weight, at::kDouble);
  return loss;
}

/// A worker of one CPU replica; the ranks of `group` are the job's workers.
struct OneReplica {
  explicit OneReplica(NamedTensors parameters, const StrategyOptions& options = {},
                      comm::CommunicatorPtr group = comm::make_single())
      : topology(one_replica_each(group->rank(), group->size())),
        options(options),
        registry(topology.devices),
        sums(registry, topology, groups, this->options, this) {
    groups.gradients = {group};
    groups.workers = group;
    registry.add({{std::move(parameters)}, {{}}}, *group);
  }

  WindowContext context() { return {registry, topology, groups, options, sums}; }

  /// Registry indices of all parameters.
  std::vector<int> all() const { return registry.parameters_of(0); }

  void build(const GradientSums::Deliver& deliver = {}) { sums.build(all(), deliver); }

  /// The window's only micro-batch.
  void backward(const at::Tensor& loss, const NotedPart& part = {.seed = {}, .contributes = true}) {
    const auto step = std::make_shared<ReplicaContext>();
    step->strategy = this;
    const ReplicaScope scope(step);
    auto& engine = sums.engine(0);
    GradientEngine::MicroBatch micro_batch;
    micro_batch.contributes = part.contributes;
    micro_batch.factor = part.factor;
    micro_batch.to_owners = sums.go_to_owners();
    engine.open_window();
    engine.begin(micro_batch);
    torch::autograd::backward({loss}, {part.seed});
    engine.flush();
  }

  /// A window whose loss has a weight of 1 on every worker; its tail, once the sums are there.
  Tail accumulate(const at::Tensor& loss) {
    backward(loss);
    auto& engine = sums.engine(0);
    engine.wait();
    const auto tail = Tail::make(topology.num_replicas, sums.trainable().size(), 0, 0);
    tail[Tail::weight] = tail[Tail::contributions] = tail[Tail::mean_losses] = 1;
    engine.add_counts(tail.counts());
    groups.workers->all_reduce(tail.tensor, ReduceOp::sum).wait();
    engine.release_gradients();
    engine.reduce_sparse(tail.counts());
    return tail;
  }

  struct Ended {
    Tail tail;
    WindowSums sums;
  };

  /// A window of one loss, from open() to finish().
  Ended play(Window& window, const Loss& loss, bool fused = true, const Closing& closing = {}) {
    window.open();
    window.weigh(0, 1);
    ReplicaPart part;
    part.loss = &loss;
    backward(loss.value, window.note(part));
    Ended ended{window.close(0, closing).tail, {}};
    ended.sums.weight = ended.tail[Tail::weight];
    ended.sums.dropped = ended.sums.weight <= 0;
    window.finish(ended.tail, fused, ended.sums);
    return ended;
  }

  Topology topology;
  Groups groups;
  StrategyOptions options;
  ParameterRegistry registry;
  GradientSums sums;
};

/// The local replicas' threads are the caller's.
inline void alone(const std::function<void(int local_replica)>& work) { work(0); }

}  // namespace muster::testing
