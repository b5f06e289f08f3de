#include "server/shard/shard.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "core/flat_layout.h"
#include "device/kernel_dtype.h"
#include "server/protocol/chunk_parts.h"

namespace muster::server {

namespace {

Bytes bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

// First what nobody else is at, locked; where `attempt` returns false, and what others are at, goes to `wait`.
template <class State, class Attempt, class Wait>
void walk(const std::vector<State*>& states, const Attempt& attempt, const Wait& wait) {
  std::vector<State*> others;
  for (auto* const own : states) {
    const auto lock = own->try_lock();
    if (!lock || !attempt(*own)) others.push_back(own);
  }
  for (auto* const own : others) wait(*own);
}

std::byte* data_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); }

}  // namespace

Shard::Shard(const Plan& plan, uint32_t server, Steps::MayPush may_push)
    : plan_(plan), rules_(plan.is_synchronous(), std::move(may_push)), tables_(plan_, server, rules_) {
  const auto chunks = cut_chunks(plan_);
  for (uint32_t c = 0; c < chunks.size(); ++c) {
    if (chunks[c].server != static_cast<int>(server)) continue;
    own_.push_back(c);
    auto& state = *states_.emplace(c, std::make_unique<State>(rules_)).first->second;
    state.chunk = chunks[c];
    parameter_bytes_ += state.chunk.parameter_bytes();
    state.memory = at::zeros({state.chunk.numel}, state.chunk.dtype);
    // No views: they would share a version counter, by which the optimizer knows who wrote a parameter.
    const auto size = static_cast<int64_t>(c10::elementSize(state.chunk.dtype));
    for (const auto& piece : state.chunk.pieces) {
      state.pieces.push_back(at::from_blob(data_of(state.memory) + piece.offset * size, {piece.run.count},
                                           at::TensorOptions(state.chunk.dtype)));
    }
    make_optimizer(state, plan_.groups);
  }
}

Shard::~Shard() = default;

Shard::State& Shard::state(uint32_t chunk) const {
  const auto found = states_.find(chunk);
  if (found == states_.end()) {
    throw InvalidArgument("this server does not own chunk " + std::to_string(chunk) +
                          "; give all workers the servers in one order");
  }
  return *found->second;
}

void Shard::make_optimizer(State& state, const FlatGroups& groups) const {
  std::vector<FlatParameter> parameters;
  for (size_t i = 0; i < state.pieces.size(); ++i) {
    const auto p = static_cast<size_t>(state.chunk.pieces[i].parameter);
    parameters.push_back({plan_.parameters[p].name, state.pieces[i], plan_.group_of[p]});
  }
  state.optimizer = std::make_unique<FlatOptimizer>(std::move(parameters), groups);
}

// Undefined where there is no such state.
at::Tensor Shard::part_of(const State& state, size_t piece, Part part) const {
  switch (part) {
    case Part::parameter:
      return state.pieces[piece];
    case Part::state0:
    case Part::state1:
    case Part::state2:
      return state.optimizer->state(piece, static_cast<size_t>(part) - static_cast<size_t>(Part::state0));
    case Part::master:
      return state.optimizer->master(piece);
    case Part::steps:
      return state.optimizer->step_count(piece).view({1});
  }
  throw InvalidArgument("a chunk has no such part; run one version of Muster on all workers and servers");
}

void Shard::write(uint32_t chunk, Part part, Bytes payload) {
  const at::NoGradGuard no_grad;
  auto& own = state(chunk);
  const auto lock = own.lock();
  const auto dtype = dtype_of(own.chunk, part);
  const int64_t numel = numel_of(own.chunk, part);
  if (payload.size() != static_cast<size_t>(numel) * c10::elementSize(dtype)) {
    throw InvalidArgument("chunk " + std::to_string(chunk) + "'s values have " + std::to_string(payload.size()) +
                          " bytes, not " + std::to_string(static_cast<size_t>(numel) * c10::elementSize(dtype)));
  }
  const auto values = at::empty({numel}, dtype);
  std::memcpy(values.mutable_data_ptr(), payload.data(), payload.size());
  for (size_t i = 0; i < own.pieces.size(); ++i) {
    const auto [offset, count] = place_of(own.chunk, i, part);
    const auto piece = values.narrow(0, offset, count);
    set_part(*own.optimizer, own.pieces[i], i, part, piece);
  }
}

void Shard::read(uint32_t chunk, Part part, uint64_t at_least, Deadline deadline, const Consume& consume) {
  auto& own = state(chunk);
  auto lock = own.lock();
  if (const auto command = own.wait_for_steps(lock, at_least, deadline)) {
    lock.unlock();
    apply_together(own, *command, deadline);
    lock.lock();
  }
  if (part == Part::parameter) return consume(bytes_of(own.memory), own.steps());
  at::Tensor values;
  for (size_t i = 0; i < own.pieces.size(); ++i) {
    const auto tensor = part_of(own, i, part);
    if (!tensor.defined()) continue;
    if (!values.defined()) values = at::zeros({numel_of(own.chunk, part)}, dtype_of(own.chunk, part));
    const auto [offset, count] = place_of(own.chunk, i, part);
    values.narrow(0, offset, count).copy_(tensor);
  }
  consume(values.defined() ? bytes_of(values) : Bytes(), own.steps());
}

bool Shard::hold(uint32_t rank, uint64_t incarnation, const Push& push, Bytes payload,
                 std::shared_ptr<const void> owner) {
  auto& own = state(push.chunk);
  if (payload.size() != static_cast<size_t>(own.chunk.gradient_bytes())) {
    throw InvalidArgument("a push of chunk " + std::to_string(push.chunk) + " has " + std::to_string(payload.size()) +
                          " bytes, not " + std::to_string(own.chunk.gradient_bytes()));
  }
  const auto lock = own.lock();
  if (!own.hold(rank, incarnation, {push.step}, {}, payload, std::move(owner))) return false;
  if (own.summed_step == push.step) own.summed_step = 0;
  return true;
}

void Shard::sum_early(uint32_t chunk, uint64_t step, const std::vector<uint32_t>& members) {
  auto& own = state(chunk);
  const auto lock = own.lock();
  if (own.has_all(step, members)) add(own, step, members);
}

// Sums what `members` pushed; all of them have.
void Shard::add(State& own, uint64_t step, const std::vector<uint32_t>& members) {
  if (own.summed_step == step && own.summed_members == members) return;
  own.summed_step = 0;
  const auto dtype = kernel_dtype(own.chunk.gradient);
  const size_t size = kernels::size_of(dtype);
  size_t tiles = 0;
  for (const auto& piece : own.chunk.pieces) tiles += kernels::num_tiles(static_cast<size_t>(piece.run.count));
  own.partials.assign(tiles, 0);
  double* partials = own.partials.data();

  const bool is_alone = members.size() == 1;
  if (!is_alone && !own.sums.defined()) own.sums = at::empty({own.chunk.numel}, own.chunk.gradient);
  std::byte* const sums = is_alone ? nullptr : data_of(own.sums);
  const size_t num_ranks = members.empty() ? 0 : members.back() + 1;
  std::vector<const std::byte*> given(num_ranks);
  for (const uint32_t rank : members) given[rank] = own.find(step, rank)->parts.front().values.data();
  own.sum = is_alone ? given.back() : sums;
  std::vector<const void*> sources(num_ranks);
  for (const auto& piece : own.chunk.pieces) {
    const size_t offset = static_cast<size_t>(piece.offset) * size;
    const auto n = static_cast<size_t>(piece.run.count);
    for (const uint32_t rank : members) sources[rank] = given[rank] + offset;
    if (members.empty()) {
      std::memset(sums + offset, 0, n * size);
    } else if (!is_alone && num_ranks <= kernels::kMaxReduceRanks) {
      const kernels::ReduceSegment segment{sources.data(), sums + offset, partials, n};
      kernels::reduce_stats(dtype, static_cast<int>(num_ranks), &segment, 1, plan_.norm_type);
    } else {
      void* destination = sums + offset;
      if (!is_alone) {
        kernels::tree_reduce(dtype, kernels::Reduction::sum, sources.data(), static_cast<int>(num_ranks), &destination,
                             1, n);
      }
      const kernels::StatsSegment segment{own.sum + offset, partials, n, dtype};
      kernels::grad_stats(&segment, 1, plan_.norm_type);
    }
    partials += kernels::num_tiles(n);
  }
  own.summed_step = step;
  own.summed_members = members;
}

std::vector<double> Shard::sum(uint64_t step, const std::vector<uint32_t>& members, Deadline deadline) {
  std::vector<double> partials;
  for (const uint32_t chunk : own_) {
    auto& own = state(chunk);
    auto lock = own.lock();
    const auto present = own.wait_for_pushes(lock, step, members, deadline);
    if (present) {
      add(own, step, *present);
      partials.insert(partials.end(), own.partials.begin(), own.partials.end());
    } else if (own.steps() == step && own.made_partials) {
      partials.insert(partials.end(), own.made_partials->begin(), own.made_partials->end());
    } else {
      throw InvalidArgument("the sums of step " + std::to_string(step) + " were applied and are gone; join again");
    }
  }
  return partials;
}

void Shard::apply(uint32_t rank, uint64_t incarnation, const Apply& apply, Deadline deadline) {
  const at::NoGradGuard no_grad;
  tables_.check(apply);
  if (plan_.is_synchronous()) {
    rules_.note_command(apply);
    wake();
  }
  std::vector<State*> order;
  const size_t count = own_.size();
  for (size_t i = 0; i < count; ++i) {
    // Each thread begins elsewhere, so that they divide the work; from the end, since who reads begins at the front.
    const size_t begin = count * rank / std::max<size_t>(plan_.workers, rank + 1);
    order.push_back(&state(own_[(2 * count - 1 - begin - i) % count]));
  }
  if (plan_.is_synchronous()) {
    const auto make_whole = [&](State& own) {
      const bool is_whole = own.has_all(apply.step, apply.members);
      if (is_whole) make(own, apply, apply.members);
      return is_whole;
    };
    walk(order, make_whole, [&](State& own) { apply_together(own, apply, deadline); });
  } else {
    const auto step_own = [&](State& own) {
      apply_alone(own, rank, incarnation, apply);
      return true;
    };
    walk(order, step_own, [&](State& own) {
      const auto lock = own.lock();
      step_own(own);
    });
  }
  tables_.apply(rank, incarnation, apply, deadline);
}

bool Shard::skip_to(uint64_t step) {
  const auto command = rules_.command_of(step);
  bool was_behind = false;
  for (const uint32_t chunk : own_) {
    auto& own = state(chunk);
    const auto lock = own.lock();
    if (own.steps() >= step) continue;
    was_behind = true;
    if (command && own.has_all(step, command->members)) {
      make(own, *command, command->members);
      continue;
    }
    own.summed_step = 0;
    own.made_partials.reset();
    own.note_made(step);
  }
  return tables_.skip_to(step, command.get()) || was_behind;
}

void Shard::apply_together(State& own, const Apply& apply, Deadline deadline) {
  auto lock = own.lock();
  const auto present = own.wait_for_pushes(lock, apply.step, apply.members, deadline);
  if (present) make(own, apply, *present);
}

void Shard::make(State& own, const Apply& apply, const std::vector<uint32_t>& members) {
  const at::NoGradGuard no_grad;
  add(own, apply.step, members);
  if (!members.empty()) step(own, apply, own.sum);
  own.made_partials = std::move(own.partials);
  own.summed_step = 0;
  own.note_made(apply.step);
}

// The chunk is locked.
void Shard::apply_alone(State& own, uint32_t rank, uint64_t incarnation, const Apply& apply) {
  const auto* const given = own.find_own(rank, incarnation, apply.step);
  if (given == nullptr) return;
  step(own, apply, given->parts.front().values.data());
  own.note_applied(rank, incarnation, apply.step);
}

void Shard::step(State& own, const Apply& apply, const std::byte* gradients) const {
  if (apply.scalars.finite == 0 || apply.scalars.dropped != 0) return;
  const auto size = static_cast<int64_t>(c10::elementSize(own.chunk.gradient));
  std::vector<FlatGradient> sums(own.pieces.size());
  for (size_t i = 0; i < own.pieces.size(); ++i) {
    const auto& piece = own.chunk.pieces[i];
    const auto parameter = static_cast<uint32_t>(piece.parameter);
    if (std::binary_search(apply.unused.begin(), apply.unused.end(), parameter)) continue;
    // Read alone: nothing is kept.
    auto* const values = const_cast<std::byte*>(gradients) + piece.offset * size;
    sums[i].dense = at::from_blob(values, {piece.run.count}, at::TensorOptions(own.chunk.gradient));
  }
  own.optimizer->step(std::move(sums), apply.groups, &apply.scalars, /*keep=*/false);
}

std::vector<uint64_t> Shard::steps(uint32_t rank, uint64_t incarnation) {
  std::vector<uint64_t> steps;
  for (const uint32_t chunk : own_) {
    auto& own = state(chunk);
    const auto lock = own.lock();
    steps.push_back(own.step_of(rank, incarnation));
  }
  const auto of_tables = tables_.steps(rank, incarnation);
  steps.insert(steps.end(), of_tables.begin(), of_tables.end());
  return steps;
}

uint64_t Shard::least_step(uint32_t rank, uint64_t incarnation) {
  const auto all = steps(rank, incarnation);
  return all.empty() ? std::numeric_limits<uint64_t>::max() : *std::min_element(all.begin(), all.end());
}

void Shard::drop_pushes(uint32_t rank) {
  if (plan_.is_synchronous()) return;
  for (const uint32_t chunk : own_) {
    auto& own = state(chunk);
    const auto lock = own.lock();
    own.drop(rank);
  }
  tables_.drop_pushes(rank);
}

void Shard::wake() {
  for (const uint32_t chunk : own_) {
    auto& own = state(chunk);
    const auto lock = own.lock();
    own.wake();
  }
  tables_.wake();
}

void Shard::stop() {
  rules_.stopped = true;
  wake();
}

}  // namespace muster::server
