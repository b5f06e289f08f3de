#include "optimizer/flat_optimizer.h"

#include <ATen/core/grad_mode.h>

#include <string>

#include "core/flat_layout.h"
#include "core/plain_memory.h"
#include "device/device.h"
#include "muster/error.h"

namespace muster {

namespace {

// Positions of the parameters that have a gradient.
std::vector<size_t> stepped_by(const DividedStep& divided) {
  const auto& gradients = divided.shares.front().gradients;
  std::vector<size_t> stepped;
  for (size_t p = 0; p < gradients.size(); ++p) {
    if (gradients[p].defined()) stepped.push_back(p);
  }
  return stepped;
}

}  // namespace

StepPlan::Counted::~Counted() {
  if (has_begun) return;
  for (const size_t p : parameters) state.take_back_step(p);
}

StepPlan::StepPlan(FlatOptimizer& optimizer, const DividedStep& divided, const FlatGroups& groups,
                   const kernels::StepScalars* scalars, bool keep)
    : optimizer_(optimizer),
      groups_(groups),
      scalars_(scalars),
      keep_(keep),
      displacements_(divided.displacements),
      counted_(optimizer.state_, /*begun=*/optimizer.is_streamed()),
      segments_(divided.shares.size()) {
  optimizer.check_kind(groups);
  const at::NoGradGuard no_grad;
  const OnDevice on_device(optimizer.state_.device());
  used_.assign(optimizer.is_streamed() ? optimizer.num_parameters() : 0, 0);
  for (const size_t p : stepped_by(divided)) {
    optimizer.state_.begin_step(p, optimizer.num_states_for(p, groups));
    counted_.parameters.push_back(p);
    if (!used_.empty()) used_[p] = 1;
  }
  for (const size_t p : counted_.parameters) add_segments(p, divided);
}

void StepPlan::add_segments(size_t p, const DividedStep& divided) {
  const auto& entry = optimizer_.state_.entry(p);
  const auto& tensor = entry.parameter.tensor;
  void* memory = tensor.mutable_data_ptr();
  if (!entry.is_dense) {
    packed_.emplace_back(p, tensor.contiguous());
    memory = packed_.back().second.mutable_data_ptr();
  }
  if (entry.parameter.is_row_wise) {
    segments_.front().add_rows(entry, divided.shares.front().gradients[p], groups_);
    return;
  }
  for (size_t s = 0; s < segments_.size(); ++s) {
    const auto& share = divided.shares[s];
    segments_[s].add(entry, share.runs[p], memory, share.gradients[p], groups_);
  }
}

void StepPlan::run(size_t share) {
  if (optimizer_.is_streamed()) {
    const auto device = optimizer_.state_.device();
    const OnDevice on_device(device);
    optimizer_.queue_.enqueue(segments_[share], groups_, scalars_, keep_, optimizer_.state_.counts(), used_, device);
    return;
  }
  const kernels::StepCopies copies{displacements_.data(), static_cast<int>(displacements_.size())};
  counted_.has_begun = true;
  segments_[share].run(groups_, *scalars_, keep_, copies);
}

void StepPlan::finish() {
  const at::NoGradGuard no_grad;
  const OnDevice on_device(optimizer_.state_.device());
  for (auto& [p, values] : packed_) optimizer_.state_.entry(p).parameter.tensor.copy_(values);
  for (const size_t p : counted_.parameters) {
    optimizer_.state_.entry(p).parameter.tensor.unsafeGetTensorImpl()->bump_version();
  }
}

FlatOptimizer::FlatOptimizer(std::vector<FlatParameter> parameters, const FlatGroups& groups, const Shard& shard)
    : state_(std::move(parameters), groups, shard), algorithm_(groups.index()) {}

void FlatOptimizer::check_kind(const FlatGroups& groups) const {
  if (groups.index() != algorithm_) throw InvalidArgument("a flat optimizer cannot become another kind of optimizer");
}

// Of a parameter's state, which follows the parameter first.
size_t FlatOptimizer::num_states_for(size_t p, const FlatGroups& groups) {
  const auto& parameter = state_.entry(p).parameter;
  if (parameter.group >= count_of(groups)) {
    throw InvalidArgument("parameter '" + parameter.name + "' is in group " + std::to_string(parameter.group) + " of " +
                          std::to_string(count_of(groups)));
  }
  state_.follow(p);
  return states_needed(groups, parameter.group);
}

StepPlan FlatOptimizer::begin(const DividedStep& divided, const FlatGroups& groups, const kernels::StepScalars* scalars,
                              bool keep) {
  return {*this, divided, groups, scalars, keep};
}

void FlatOptimizer::step(std::vector<FlatGradient> gradients, const FlatGroups& groups,
                         const kernels::StepScalars* scalars, bool keep) {
  DividedStep whole;
  whole.shares.resize(1);
  whole.shares.front().gradients = std::move(gradients);
  for (size_t p = 0; p < num_parameters(); ++p) whole.shares.front().runs.push_back(state_.entry(p).run);
  auto plan = begin(whole, groups, scalars, keep);
  plan.run(0);
  plan.finish();
}

int64_t FlatOptimizer::common_bytes(const DividedStep& divided, const FlatGroups& groups) {
  check_kind(groups);
  if (shard().size > 1) throw InvalidArgument("a sharded optimizer keeps its own part of the state; step() it");
  const at::NoGradGuard no_grad;
  const auto stepped = stepped_by(divided);
  std::vector<size_t> num_states;
  for (const size_t p : stepped) num_states.push_back(num_states_for(p, groups));
  return state_.common_bytes(stepped, num_states);
}

std::vector<at::Tensor> FlatOptimizer::share_state(const DividedStep& divided, const FlatGroups& groups,
                                                   const at::Tensor& memory) {
  const auto stepped = stepped_by(divided);
  std::vector<size_t> num_states;
  for (const size_t p : stepped) num_states.push_back(num_states_for(p, groups));
  std::vector<std::vector<Run>> runs;
  for (const auto& share : divided.shares) runs.push_back(share.runs);
  return state_.move_to_common(stepped, num_states, memory, runs);
}

void FlatOptimizer::step_from_grad(const FlatGroups& groups) {
  if (shard().size > 1) {
    throw InvalidArgument("with shard_optimizer=True an optimizer steps within strategy.step only; call that");
  }
  const at::NoGradGuard no_grad;
  const OnDevice on_device(state_.device());
  std::vector<FlatGradient> gradients(num_parameters());
  for (size_t p = 0; p < gradients.size(); ++p) {
    const auto& entry = state_.entry(p);
    const auto& gradient = entry.parameter.tensor.grad();
    if (!gradient.defined()) continue;
    state_.follow(p);
    state_.leave_common(p);
    const auto wide = in_plain_memory(gradient.to(accumulation_dtype(entry.dtype)));
    if (wide.is_sparse()) {
      gradients[p].sparse = wide.coalesce();
    } else if (entry.is_dense ? wide.strides() == entry.parameter.tensor.strides() : wide.is_contiguous()) {
      gradients[p].dense = wide;
    } else {
      gradients[p].dense = state_.empty_state(p).copy_(wide);
    }
  }
  const kernels::StepScalars plain{.divisor = 1, .clip = 1, .norm = 0, .unit = 1, .finite = 1, .dropped = 0};
  const auto* scalars = is_streamed() ? scalars_table_.follow({plain}, state_.device()) : &plain;
  step(std::move(gradients), groups, scalars, /*keep=*/false);
}

void FlatOptimizer::gather_parameters(comm::Communicator& ranks, bool enqueues) {
  if (shard().size == 1) return;
  const at::NoGradGuard no_grad;
  const auto all_runs = state_.runs_of_ranks();
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    std::vector<at::Tensor> memories;
    std::vector<std::vector<Run>> runs(all_runs.size());
    for (size_t p = 0; p < num_parameters(); ++p) {
      const auto& entry = state_.entry(p);
      if (entry.dtype != dtype || !entry.started) continue;
      // A tensor of its own version counter: step() has counted this write.
      const auto values = entry.parameter.tensor.variable_data();
      memories.push_back(elements_of(values, {0, values.numel()}));
      for (size_t r = 0; r < runs.size(); ++r) runs[r].push_back(all_runs[r][p]);
    }
    if (enqueues) {
      broadcast_runs(memories, runs, ranks);
    } else {
      exchange_runs(memories, runs, ranks);
    }
  }
}

}  // namespace muster
