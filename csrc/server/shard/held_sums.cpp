#include "server/shard/held_sums.h"

#include <string>
#include <utility>

#include "muster/error.h"

namespace muster::server {

bool HeldSums::keep(uint32_t rank, uint64_t incarnation, const Portion& part, std::span<const int64_t> rows,
                    Bytes values, std::shared_ptr<const void> owner) {
  const auto lock = this->lock();
  if (!hold(rank, incarnation, part, rows, values, std::move(owner))) return false;
  if (summed_.step == part.step) summed_.step = 0;
  return true;
}

void HeldSums::sum_early(uint64_t step, const std::vector<uint32_t>& members) {
  const auto lock = this->lock();
  if (has_all(step, members)) add_once(step, members);
}

void HeldSums::add_once(uint64_t step, const std::vector<uint32_t>& members) {
  if (summed_.step == step && summed_.members == members) return;
  summed_.step = 0;
  summed_.norm = add(step, members);
  summed_.members = members;
  summed_.step = step;
}

kernels::NormSum HeldSums::sum(uint64_t step, const std::vector<uint32_t>& members, Deadline deadline) {
  auto lock = this->lock();
  wait_for_pushes(lock, step, members, deadline);
  if (const auto norm = norm_now(step, members)) return *norm;
  throw InvalidArgument("the sums of step " + std::to_string(step) + " over these workers are gone; join again");
}

std::optional<kernels::NormSum> HeldSums::norm_now(uint64_t step, const std::vector<uint32_t>& members) {
  if (has_all(step, members)) {
    add_once(step, members);
    return summed_.norm;
  }
  // That of a snapshot does not say whose it is.
  const bool is_theirs = made_.members.empty() || made_.members == members;
  return made_.step == step && is_theirs ? std::optional(made_.norm) : std::nullopt;
}

Pushes::Lock HeldSums::lock_after(uint64_t at_least, Deadline deadline) {
  auto lock = this->lock();
  if (const auto command = wait_for_steps(lock, at_least, deadline)) {
    lock.unlock();
    apply_together(*command, deadline);
    lock.lock();
  }
  return lock;
}

void HeldSums::apply_together(const Apply& apply, Deadline deadline) {
  auto lock = this->lock();
  if (wait_for_pushes(lock, apply.step, apply.members, deadline)) make(apply);
}

bool HeldSums::apply_whole(const Apply& apply) {
  if (!has_all(apply.step, apply.members)) return false;
  make(apply);
  return true;
}

void HeldSums::make(const Apply& apply) {
  add_once(apply.step, apply.members);
  step(apply, nullptr);
  made_ = summed_;
  summed_.step = 0;
  note_made(apply.step);
  const auto [first, last] = when_made_.equal_range(apply.step);
  for (auto take = first; take != last; ++take) take->second();
  when_made_.erase(when_made_.begin(), last);
}

bool HeldSums::when_made(uint64_t step, std::function<void()> take) {
  const auto lock = this->lock();
  if (steps() > step) return false;
  if (steps() == step) {
    take();
  } else {
    when_made_.emplace(step, std::move(take));
  }
  return true;
}

void HeldSums::apply_alone(uint32_t rank, uint64_t incarnation, const Apply& apply) {
  const auto* const given = find_own(rank, incarnation, apply.step);
  if (given == nullptr) return;
  step(apply, given);
  note_applied(rank, incarnation, apply.step);
}

bool HeldSums::settle(const Apply& command) {
  const auto lock = this->lock();
  return steps() == command.step || (steps() < command.step && apply_whole(command));
}

Image::Facts HeldSums::facts_of_steps() const {
  Image::Facts facts;
  facts.made = record();
  facts.has_norm = made_.step != 0 && made_.step == steps();
  if (facts.has_norm) facts.norm = made_.norm;
  return facts;
}

void HeldSums::restore_steps(const Image::Facts& facts) {
  Pushes::restore(facts.made);
  made_ = {facts.has_norm ? facts.made.steps : 0, {}, facts.norm};
}

}  // namespace muster::server
