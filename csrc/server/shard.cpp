#include "server/shard.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "comm/kernel_dtype.h"
#include "core/flat_layout.h"
#include "server/chunk_parts.h"

namespace muster::server {

namespace {

std::string text_of(const std::vector<uint32_t>& ranks) {
  std::string text;
  for (const uint32_t rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

Bytes bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

std::byte* data_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); }

}  // namespace

Shard::Shard(const Plan& plan, uint32_t server, MayPush may_push) : plan_(plan), may_push_(std::move(may_push)) {
  const auto chunks = cut_chunks(plan_);
  for (uint32_t c = 0; c < chunks.size(); ++c) {
    if (chunks[c].server != static_cast<int>(server)) continue;
    own_.push_back(c);
    auto& state = *states_.emplace(c, std::make_unique<State>()).first->second;
    state.chunk = chunks[c];
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
  const Lock lock(own.mutex);
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

void Shard::wait(State& state, Lock& lock, Deadline deadline, const char* what, const std::function<bool()>& ready) {
  while (!ready()) {
    if (stopped_) throw CommError("the parameter server ends; start it again, or end the job");
    if (state.changed.wait_until(lock, deadline) == std::cv_status::timeout && !ready()) {
      throw Timeout(std::string("a parameter server waited too long for ") + what +
                    "; look at the logs of the workers, and raise timeout if they are slow");
    }
  }
}

void Shard::read(uint32_t chunk, Part part, uint64_t at_least, Deadline deadline, const Consume& consume) {
  auto& own = state(chunk);
  Lock lock(own.mutex);
  std::shared_ptr<const Apply> command;
  wait(own, lock, deadline, "a step to be applied", [&] {
    if (own.steps < at_least) command = command_of(at_least);
    return own.steps >= at_least || command;
  });
  if (own.steps < at_least) {
    lock.unlock();
    apply_together(own, *command, deadline);
    lock.lock();
  }
  if (part == Part::parameter) return consume(bytes_of(own.memory), own.steps);
  at::Tensor values;
  for (size_t i = 0; i < own.pieces.size(); ++i) {
    const auto tensor = part_of(own, i, part);
    if (!tensor.defined()) continue;
    if (!values.defined()) values = at::zeros({numel_of(own.chunk, part)}, dtype_of(own.chunk, part));
    const auto [offset, count] = place_of(own.chunk, i, part);
    values.narrow(0, offset, count).copy_(tensor);
  }
  consume(values.defined() ? bytes_of(values) : Bytes(), own.steps);
}

bool Shard::hold(uint32_t rank, uint64_t incarnation, const Push& push, Bytes payload,
                 std::shared_ptr<const void> owner) {
  auto& own = state(push.chunk);
  if (payload.size() != static_cast<size_t>(own.chunk.gradient_bytes())) {
    throw InvalidArgument("a push of chunk " + std::to_string(push.chunk) + " has " + std::to_string(payload.size()) +
                          " bytes, not " + std::to_string(own.chunk.gradient_bytes()));
  }
  const Lock lock(own.mutex);
  if (plan_.is_synchronous()) {
    if (push.step <= own.steps) return false;
  } else {
    const auto& mark = own.marks[rank];
    if (mark.incarnation > incarnation || (mark.incarnation == incarnation && push.step <= mark.step)) return false;
  }
  size_t held = 0;
  for (const auto& [step, contributions] : own.held) held += contributions.contains(rank) ? 1 : 0;
  if (held > kMaxHeld) {
    throw InvalidArgument("worker " + std::to_string(rank) + " pushes step " + std::to_string(push.step) +
                          " of a chunk before earlier ones are applied");
  }
  auto& contribution = own.held[push.step][rank];
  if (contribution.incarnation >= incarnation) return false;
  if (contribution.incarnation == 0) held_bytes_ += static_cast<int64_t>(payload.size());
  contribution = {incarnation, payload, std::move(owner)};
  if (own.summed_step == push.step) own.summed_step = 0;
  own.changed.notify_all();
  return true;
}

void Shard::sum_early(uint32_t chunk, uint64_t step, const std::vector<uint32_t>& members) {
  auto& own = state(chunk);
  const Lock lock(own.mutex);
  if (own.steps + 1 != step) return;
  const auto found = own.held.find(step);
  if (found == own.held.end()) return;
  for (const uint32_t rank : members) {
    if (!found->second.contains(rank)) return;
  }
  add(own, step, members);
}

// Sums what `members` pushed; all of them have.
void Shard::add(State& own, uint64_t step, const std::vector<uint32_t>& members) {
  if (own.summed_step == step && own.summed_members == members) return;
  own.summed_step = 0;
  const auto& held = own.held[step];
  const auto dtype = kernel_dtype(own.chunk.gradient);
  const size_t size = kernels::size_of(dtype);
  size_t tiles = 0;
  for (const auto& piece : own.chunk.pieces) tiles += kernels::num_tiles(static_cast<size_t>(piece.run.count));
  own.partials.assign(tiles, 0);
  double* partials = own.partials.data();

  const bool is_alone = members.size() == 1;
  if (!is_alone && !own.sums.defined()) own.sums = at::empty({own.chunk.numel}, own.chunk.gradient);
  std::byte* const sums = is_alone ? nullptr : data_of(own.sums);
  own.sum = is_alone ? held.at(members.front()).values.data() : sums;
  const size_t num_ranks = members.empty() ? 0 : members.back() + 1;
  std::vector<const void*> sources(num_ranks);
  for (const auto& piece : own.chunk.pieces) {
    const size_t offset = static_cast<size_t>(piece.offset) * size;
    const auto n = static_cast<size_t>(piece.run.count);
    for (const uint32_t rank : members) sources[rank] = held.at(rank).values.data() + offset;
    if (members.empty()) {
      std::memset(sums + offset, 0, n * size);
    } else if (!is_alone && num_ranks <= kernels::kMaxReduceRanks) {
      const kernels::ReduceSegment segment{sources.data(), sums + offset, partials, n};
      kernels::reduce_stats(dtype, static_cast<int>(num_ranks), &segment, 1);
    } else {
      void* destination = sums + offset;
      if (!is_alone) {
        kernels::tree_reduce(dtype, kernels::Reduction::sum, sources.data(), static_cast<int>(num_ranks), &destination,
                             1, n);
      }
      const kernels::StatsSegment segment{own.sum + offset, partials, n, dtype};
      kernels::grad_stats(&segment, 1);
    }
    partials += kernels::num_tiles(n);
  }
  own.summed_step = step;
  own.summed_members = members;
}

// Until every member's push is there that may still come, or the step is made; returns whose are there.
std::vector<uint32_t> Shard::wait_for_pushes(State& own, Lock& lock, uint64_t step,
                                             const std::vector<uint32_t>& members, Deadline deadline) {
  std::vector<uint32_t> present;
  const std::string what = "pushes of step " + std::to_string(step) + " from workers " + text_of(members);
  wait(own, lock, deadline, what.c_str(), [&] {
    if (own.steps >= step) return true;  // another thread had all of them, and they are gone
    present.clear();
    bool is_complete = true;
    const auto& held = own.held[step];
    for (const uint32_t rank : members) {
      if (held.contains(rank)) {
        present.push_back(rank);
      } else {
        is_complete = is_complete && !may_push_(rank, step);
      }
    }
    return is_complete;
  });
  return present;
}

std::vector<double> Shard::sum(uint64_t step, const std::vector<uint32_t>& members, Deadline deadline) {
  std::vector<double> partials;
  for (const uint32_t chunk : own_) {
    auto& own = state(chunk);
    Lock lock(own.mutex);
    wait(own, lock, deadline, "the step before", [&] { return own.steps + 1 >= step; });
    const auto present = wait_for_pushes(own, lock, step, members, deadline);
    if (own.steps > step || (own.steps == step && own.made_partials.empty())) {
      throw InvalidArgument("the sums of step " + std::to_string(step) + " were applied and are gone; join again");
    }
    if (own.steps < step) add(own, step, present);
    const auto& known = own.steps < step ? own.partials : own.made_partials;
    partials.insert(partials.end(), known.begin(), known.end());
  }
  return partials;
}

std::shared_ptr<const Apply> Shard::command_of(uint64_t step) const {
  const Lock lock(command_mutex_);
  return command_ && command_->step == step ? command_ : nullptr;
}

void Shard::apply(uint32_t rank, uint64_t incarnation, const Apply& apply, Deadline deadline) {
  const at::NoGradGuard no_grad;
  if (plan_.is_synchronous()) {
    {
      const Lock lock(command_mutex_);
      if (!command_ || command_->step < apply.step) command_ = std::make_shared<const Apply>(apply);
    }
    wake();
  }
  const size_t count = own_.size();
  for (size_t i = 0; i < count; ++i) {
    // Each thread begins elsewhere, so that they divide the work.
    auto& own = state(own_[(i + count * rank / std::max<size_t>(plan_.workers, rank + 1)) % count]);
    if (plan_.is_synchronous()) {
      apply_together(own, apply, deadline);
    } else {
      apply_alone(own, rank, incarnation, apply);
    }
  }
}

void Shard::apply_together(State& own, const Apply& apply, Deadline deadline) {
  const at::NoGradGuard no_grad;
  Lock lock(own.mutex);
  wait(own, lock, deadline, "the step before", [&] { return own.steps + 1 >= apply.step; });
  if (own.steps >= apply.step) return;
  const auto present = wait_for_pushes(own, lock, apply.step, apply.members, deadline);
  if (own.steps >= apply.step) return;
  add(own, apply.step, present);
  if (!present.empty()) step(own, apply, own.sum);
  own.steps = apply.step;
  own.made_partials = std::move(own.partials);
  own.summed_step = 0;
  forget(own, own.held.begin(), own.held.upper_bound(apply.step));
  own.changed.notify_all();
}

void Shard::apply_alone(State& own, uint32_t rank, uint64_t incarnation, const Apply& apply) {
  const Lock lock(own.mutex);
  auto& mark = own.marks[rank];
  if (mark.incarnation > incarnation || (mark.incarnation == incarnation && mark.step >= apply.step)) return;
  const auto held = own.held.find(apply.step);
  const auto found = held == own.held.end() ? Contributions::iterator() : held->second.find(rank);
  if (held == own.held.end() || found == held->second.end() || found->second.incarnation != incarnation) {
    throw InvalidArgument("worker " + std::to_string(rank) + " applies step " + std::to_string(apply.step) +
                          " without having pushed all of it");
  }
  step(own, apply, found->second.values.data());
  mark = {incarnation, apply.step};
  ++own.steps;
  held_bytes_ -= static_cast<int64_t>(found->second.values.size());
  held->second.erase(found);
  if (held->second.empty()) own.held.erase(held);
  own.changed.notify_all();
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

void Shard::forget(State& own, std::map<uint64_t, Contributions>::iterator first,
                   std::map<uint64_t, Contributions>::iterator last) {
  for (auto step = first; step != last; ++step) {
    for (const auto& [rank, contribution] : step->second) {
      held_bytes_ -= static_cast<int64_t>(contribution.values.size());
    }
  }
  own.held.erase(first, last);
}

std::vector<uint64_t> Shard::steps(uint32_t rank, uint64_t incarnation) const {
  std::vector<uint64_t> steps;
  for (const uint32_t chunk : own_) {
    auto& own = state(chunk);
    const Lock lock(own.mutex);
    if (plan_.is_synchronous()) {
      steps.push_back(own.steps);
    } else {
      const auto mark = own.marks.find(rank);
      steps.push_back(mark != own.marks.end() && mark->second.incarnation == incarnation ? mark->second.step : 0);
    }
  }
  return steps;
}

uint64_t Shard::least_step(uint32_t rank, uint64_t incarnation) const {
  const auto all = steps(rank, incarnation);
  return all.empty() ? std::numeric_limits<uint64_t>::max() : *std::min_element(all.begin(), all.end());
}

void Shard::drop_pushes(uint32_t rank) {
  if (plan_.is_synchronous()) return;
  for (const uint32_t chunk : own_) {
    auto& own = state(chunk);
    const Lock lock(own.mutex);
    for (auto step = own.held.begin(); step != own.held.end();) {
      const auto found = step->second.find(rank);
      if (found != step->second.end()) {
        held_bytes_ -= static_cast<int64_t>(found->second.values.size());
        step->second.erase(found);
      }
      step = step->second.empty() ? own.held.erase(step) : std::next(step);
    }
  }
}

void Shard::wake() {
  for (const uint32_t chunk : own_) {
    auto& own = state(chunk);
    const Lock lock(own.mutex);
    own.changed.notify_all();
  }
}

void Shard::stop() {
  stopped_ = true;
  wake();
}

}  // namespace muster::server
