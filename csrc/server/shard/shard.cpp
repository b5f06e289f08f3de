#include "server/shard/shard.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "muster/error.h"

namespace muster::server {

namespace {

// First what nobody else is at, locked; where `attempt` returns false, and what others are at, goes to `wait`.
template <class Attempt, class Wait>
void walk(const std::vector<HeldSums*>& states, const Attempt& attempt, const Wait& wait) {
  std::vector<HeldSums*> others;
  for (auto* const own : states) {
    const auto lock = own->try_lock();
    if (!lock || !attempt(*own)) others.push_back(own);
  }
  for (auto* const own : others) wait(*own);
}

}  // namespace

Shard::Shard(const Plan& plan, uint32_t server, Steps::MayPush may_push, Timekeeper& time)
    : plan_(plan), rules_(plan.is_synchronous(), std::move(may_push), time), tables_(plan_, server, rules_) {
  const auto chunks = cut_chunks(plan_);
  for (uint32_t c = 0; c < chunks.size(); ++c) {
    if (chunks[c].server != static_cast<int>(server)) continue;
    own_.push_back(c);
    auto& chunk = *chunks_.emplace(c, std::make_unique<HeldChunk>(plan_, c, chunks[c], rules_)).first->second;
    parameter_bytes_ += chunk.chunk().parameter_bytes();
    members_.push_back(&chunk);
  }
  for (auto* const stripe : tables_.members()) members_.push_back(stripe);
}

Shard::~Shard() = default;

HeldChunk& Shard::chunk(uint32_t index) const {
  const auto found = chunks_.find(index);
  if (found == chunks_.end()) {
    throw InvalidArgument("this server does not own chunk " + std::to_string(index) +
                          "; give all workers the servers in one order");
  }
  return *found->second;
}

void Shard::write(uint32_t index, Part part, Bytes payload) { chunk(index).write(part, payload); }

void Shard::read(uint32_t index, Part part, uint64_t at_least, Deadline deadline, const Consume& consume) {
  chunk(index).read(part, at_least, deadline, consume);
}

bool Shard::hold(uint32_t rank, uint64_t incarnation, const Push& push, Bytes payload,
                 std::shared_ptr<const void> owner) {
  auto& own = chunk(push.chunk);
  if (payload.size() != static_cast<size_t>(own.chunk().gradient_bytes())) {
    throw InvalidArgument("a push of chunk " + std::to_string(push.chunk) + " has " + std::to_string(payload.size()) +
                          " bytes, not " + std::to_string(own.chunk().gradient_bytes()));
  }
  return own.keep(rank, incarnation, {push.step}, {}, payload, std::move(owner));
}

void Shard::sum_early(uint32_t index, uint64_t step, const std::vector<uint32_t>& members) {
  chunk(index).sum_early(step, members);
}

std::vector<HeldSums*> Shard::order_for(uint32_t rank) const {
  const size_t ranks = std::max<size_t>(plan_.workers, rank + 1);
  const size_t chunks = own_.size();
  const size_t stripes = members_.size() - chunks;
  std::vector<HeldSums*> order;
  for (size_t i = 0; i < chunks; ++i) {  // from the end, since who reads begins at the front
    order.push_back(members_[(2 * chunks - 1 - chunks * rank / ranks - i) % chunks]);
  }
  for (size_t i = 0; i < stripes; ++i) order.push_back(members_[chunks + (stripes * rank / ranks + i) % stripes]);
  return order;
}

kernels::NormSum Shard::sum(uint32_t rank, uint64_t step, const std::vector<uint32_t>& members, Deadline deadline) {
  kernels::NormSum sum;
  const auto add = [&](const kernels::NormSum& own) { kernels::join_norm_sums(sum, own, plan_.norm_type); };
  const auto add_known = [&](HeldSums& own) {
    const auto norm = own.norm_now(step, members);
    if (norm) add(*norm);
    return norm.has_value();
  };
  walk(order_for(rank), add_known, [&](HeldSums& own) { add(own.sum(step, members, deadline)); });
  return sum;
}

void Shard::apply(uint32_t rank, uint64_t incarnation, const Apply& apply, Deadline deadline) {
  tables_.check(apply);
  if (plan_.is_synchronous()) {
    rules_.note_command(apply);
    wake();
    const auto make_whole = [&](HeldSums& own) { return own.apply_whole(apply); };
    walk(order_for(rank), make_whole, [&](HeldSums& own) { own.apply_together(apply, deadline); });
    return;
  }
  const auto step_own = [&](HeldSums& own) {
    own.apply_alone(rank, incarnation, apply);
    return true;
  };
  walk(order_for(rank), step_own, [&](HeldSums& own) {
    const auto lock = own.lock();
    step_own(own);
  });
}

bool Shard::settle(const Apply& command) {
  bool is_made = true;
  for (auto* const own : members_) is_made = own->settle(command) && is_made;
  return is_made;
}

void Shard::drop_all() {
  for (auto* const own : members_) {
    const auto lock = own->lock();
    own->drop_all();
  }
}

std::vector<uint64_t> Shard::steps(uint32_t rank, uint64_t incarnation) {
  std::vector<uint64_t> steps;
  for (const uint32_t index : own_) steps.push_back(chunk(index).step_of(rank, incarnation));
  const auto of_tables = tables_.steps(rank, incarnation);
  steps.insert(steps.end(), of_tables.begin(), of_tables.end());
  return steps;
}

uint64_t Shard::least_step(uint32_t rank, uint64_t incarnation) {
  const auto all = steps(rank, incarnation);
  return all.empty() ? std::numeric_limits<uint64_t>::max() : *std::min_element(all.begin(), all.end());
}

void Shard::drop_pushes(uint32_t rank, uint64_t incarnation) {
  if (plan_.is_synchronous()) return;
  for (auto* const own : members_) {
    const auto lock = own->lock();
    own->drop(rank, incarnation);
  }
}

void Shard::wake() {
  for (auto* const own : members_) own->wake();
}

void Shard::stop() {
  rules_.stopped = true;
  wake();
}

std::vector<std::unique_ptr<Image>> Shard::begin_images(Take take) const {
  std::vector<std::unique_ptr<Image>> images;
  for (auto* const own : members_) {
    const auto lock = own->lock();
    images.push_back((own->*take)());
  }
  return images;
}

}  // namespace muster::server
