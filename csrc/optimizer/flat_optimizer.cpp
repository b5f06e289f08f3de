#include "optimizer/flat_optimizer.h"

#include <ATen/core/grad_mode.h>

#include <string>

#include "core/flat_layout.h"
#include "core/plain_memory.h"
#include "core/sparse_rows.h"
#include "device/device.h"
#include "device/kernel_status.h"
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

constexpr at::ScalarType kSteppedDtypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf};

// A parameter's elements in memory order, by a version counter of their own: the step has counted the write.
at::Tensor memory_of(const at::Tensor& parameter) {
  return elements_of(parameter.variable_data(), {0, parameter.numel()});
}

// Of runs[rank][parameter] those of some parameters.
std::vector<std::vector<Run>> chosen(const std::vector<std::vector<Run>>& runs, const std::vector<size_t>& which) {
  std::vector<std::vector<Run>> some;
  for (const auto& of_rank : runs) {
    auto& own = some.emplace_back();
    for (const size_t p : which) own.push_back(of_rank[p]);
  }
  return some;
}

// The sums of a step may be older than what user code made of the parameter.
void check_shape(const FlatParameter& parameter, const FlatGradient& gradient) {
  const auto& values = gradient.sparse.defined() ? gradient.sparse : gradient.dense;
  if (values.sizes() == parameter.tensor.sizes()) return;
  throw InvalidArgument("parameter '" + parameter.name + "' has shape " + c10::str(parameter.tensor.sizes()) +
                        ", and the gradient to step it by has shape " + c10::str(values.sizes()) +
                        "; give it another shape between steps, and drop its .grad then");
}

// By share and parameter.
std::vector<std::vector<Run>> runs_of(const DividedStep& divided) {
  std::vector<std::vector<Run>> runs;
  for (const auto& share : divided.shares) runs.push_back(share.runs);
  return runs;
}

}  // namespace

StepPlan::Counted::~Counted() {
  if (has_begun) return;
  for (const size_t p : parameters) state.take_back_step(p);
}

StepPlan::StepPlan(FlatOptimizer& optimizer, const DividedStep& divided, const FlatGroups& groups,
                   const kernels::StepScalars* scalars, bool keep)
    : optimizer_(optimizer),
      divided_(divided),
      groups_(groups),
      scalars_(scalars),
      keep_(keep),
      counted_(optimizer.state_, /*begun=*/optimizer.is_streamed()),
      segments_(divided.shares.size()) {
  optimizer.check_kind(groups);
  const at::NoGradGuard no_grad;
  const OnDevice on_device(optimizer.state_.device());
  for (const size_t p : stepped_by(divided)) {
    optimizer.state_.begin_step(p, optimizer.num_states_for(p, groups));
    counted_.parameters.push_back(p);
  }
  for (const size_t p : counted_.parameters) add_segments(p);
  if (!optimizer.is_streamed()) return;
  const auto device = optimizer.state_.device();
  std::vector<double> used(optimizer.num_parameters(), 0);
  for (const size_t p : counted_.parameters) used[p] = 1;
  const auto* const table = counted_.parameters.size() == used.size() ? nullptr : optimizer.used_.follow(used, device);
  check_kernel(kernels::cuda::count_steps(optimizer.state_.counts().mutable_data_ptr<float>(), table, used.size(),
                                          scalars, stream_handle(device)),
               "counting steps");
  if (optimizer.queues_.size() < segments_.size()) optimizer.queues_.resize(segments_.size());
}

void StepPlan::add_segments(size_t p) {
  const auto& entry = optimizer_.state_.entry(p);
  const auto& tensor = entry.parameter.tensor;
  optimizer_.state_.check_tensors(p);
  for (const auto& share : divided_.shares) check_shape(entry.parameter, share.gradients[p]);
  void* memory = tensor.mutable_data_ptr();
  if (!entry.is_dense) {
    packed_.emplace_back(p, tensor.contiguous());
    memory = packed_.back().second.mutable_data_ptr();
  }
  if (entry.parameter.is_row_wise) {
    segments_.front().add_rows(entry, divided_.shares.front().gradients[p], groups_);
    return;
  }
  for (size_t s = 0; s < segments_.size(); ++s) {
    const auto& share = divided_.shares[s];
    const auto& run = share.runs.empty() ? entry.run : share.runs[p];
    if (run.count == 0) continue;
    std::vector<void*> copies;
    const bool stores = divided_.stores_to_all && !share.parameters.empty();
    for (size_t other = 0; other < segments_.size() && stores; ++other) {
      if (other != s) copies.push_back(divided_.shares[other].parameters[p].mutable_data_ptr());
    }
    void* const own = share.parameters.empty() ? memory : share.parameters[p].mutable_data_ptr();
    segments_[s].add(entry, run, own, share.gradients[p], groups_, copies);
  }
}

void StepPlan::run(size_t share) {
  const auto& divided = divided_.shares[share];
  if (optimizer_.is_streamed()) {
    const auto device = divided.parameters.empty() ? optimizer_.state_.device() : divided.parameters.front().device();
    const OnDevice on_device(device);
    optimizer_.queues_[share].enqueue(segments_[share], groups_,
                                      divided.scalars == nullptr ? scalars_ : divided.scalars, keep_, device);
    return;
  }
  const auto& displacements = divided_.displacements;
  const kernels::StepCopies copies{displacements.data(), static_cast<int>(displacements.size())};
  counted_.has_begun = true;
  segments_[share].run(groups_, *scalars_, keep_, copies);
}

void StepPlan::finish() {
  const at::NoGradGuard no_grad;
  const OnDevice on_device(optimizer_.state_.device());
  for (auto& [p, values] : packed_) optimizer_.state_.entry(p).parameter.tensor.copy_(values);
  for (const size_t p : counted_.parameters) {
    optimizer_.state_.entry(p).parameter.tensor.unsafeGetTensorImpl()->bump_version();
    for (size_t s = 1; s < divided_.shares.size(); ++s) {
      const auto& others = divided_.shares[s].parameters;
      if (!others.empty()) others[p].unsafeGetTensorImpl()->bump_version();
    }
  }
}

FlatOptimizer::FlatOptimizer(std::vector<FlatParameter> parameters, const FlatGroups& groups, const Shard& shard)
    : state_(std::move(parameters), groups, shard), algorithm_(groups.index()) {}

void FlatOptimizer::check_kind(const FlatGroups& groups) const {
  if (groups.index() != algorithm_)
    throw InvalidArgument("a flat optimizer cannot become another kind of optimizer; prepare() one of that kind");
}

void FlatOptimizer::follow_shapes() {
  state_.follow_sizes();
  for (size_t p = 0; p < num_parameters(); ++p) {
    const auto& entry = state_.entry(p);
    if (entry.is_resized() && entry.parameter.tensor.requires_grad()) state_.follow(p);
  }
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

std::vector<size_t> FlatOptimizer::num_states_of(const std::vector<size_t>& parameters, const FlatGroups& groups) {
  std::vector<size_t> num_states;
  for (const size_t p : parameters) num_states.push_back(num_states_for(p, groups));
  return num_states;
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
  if (shard().size > 1) state_.follow_sizes();
  auto plan = begin(whole, groups, scalars, keep);
  plan.run(0);
  plan.finish();
}

int64_t FlatOptimizer::common_bytes(const DividedStep& divided, const FlatGroups& groups) {
  check_kind(groups);
  if (shard().size > 1) throw InvalidArgument("a sharded optimizer keeps its own part of the state; step() it");
  const at::NoGradGuard no_grad;
  const auto stepped = stepped_by(divided);
  const auto parts = state_.common_parts(stepped, num_states_of(stepped, groups), state_.runs_for(undivided(1)));
  return parts.empty() ? 0 : parts.front().bytes;
}

std::vector<DevicePart> FlatOptimizer::common_parts(const DividedStep& divided, const FlatGroups& groups,
                                                    const std::vector<c10::Device>& devices) {
  const auto stepped = stepped_by(divided);
  std::vector<DevicePart> parts;
  for (const auto& part : state_.common_parts(stepped, num_states_of(stepped, groups), runs_of(divided))) {
    parts.push_back({devices[part.share], part.bytes});
  }
  return parts;
}

std::vector<at::Tensor> FlatOptimizer::share_state(const DividedStep& divided, const FlatGroups& groups,
                                                   const at::Tensor& memory) {
  const auto stepped = stepped_by(divided);
  return state_.move_to_common(stepped, num_states_of(stepped, groups), memory, runs_of(divided));
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
    check_shape(entry.parameter, {gradient, {}});
    state_.follow(p);
    if (!is_streamed()) state_.leave_common(p);  // other processes' memory; devices' is this one's alone
    const auto wide = in_plain_memory(gradient.to(accumulation_dtype(entry.dtype)));
    if (wide.is_sparse()) {
      gradients[p].sparse = by_rows(wide).coalesce();
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

// Positions of the parameters of a dtype that were ever stepped.
std::vector<size_t> FlatOptimizer::started_of(at::ScalarType dtype) const {
  std::vector<size_t> started;
  for (size_t p = 0; p < num_parameters(); ++p) {
    if (state_.entry(p).dtype == dtype && state_.entry(p).started) started.push_back(p);
  }
  return started;
}

void FlatOptimizer::gather_parameters(comm::Communicator& ranks) {
  if (shard().size == 1) return;
  const at::NoGradGuard no_grad;
  const auto all_runs = state_.runs_for(undivided(shard().size));
  for (const auto dtype : kSteppedDtypes) {
    const auto started = started_of(dtype);
    std::vector<at::Tensor> memories;
    for (const size_t p : started) memories.push_back(memory_of(state_.entry(p).parameter.tensor));
    exchange_runs(memories, chosen(all_runs, started), ranks);
  }
}

void FlatOptimizer::broadcast_parameters(const std::vector<std::vector<at::Tensor>>& copies,
                                         const std::vector<std::vector<Run>>& runs,
                                         const std::vector<comm::CommunicatorPtr>& replicas) {
  const at::NoGradGuard no_grad;
  for (const auto dtype : kSteppedDtypes) {
    const auto started = started_of(dtype);
    std::vector<std::vector<at::Tensor>> memories;
    for (const auto& of_replica : copies) {
      auto& own = memories.emplace_back();
      for (const size_t p : started) own.push_back(memory_of(of_replica[p]));
    }
    broadcast_runs(memories, chosen(runs, started), replicas);
  }
}

}  // namespace muster
