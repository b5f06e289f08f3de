#include "server/shard/held_sums.h"

#include <string>
#include <utility>

#include "muster/error.h"

namespace muster::server {

bool HeldSums::keep(uint32_t rank, uint64_t incarnation, const Portion& part, const std::vector<int64_t>& rows,
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
  if (summed_.step == step && summed_members_ == members) return;
  summed_.step = 0;
  add(step, members, summed_);
  summed_.step = step;
  summed_members_ = members;
}

const HeldSums::Statistics& HeldSums::sum(Lock& lock, uint64_t step, const std::vector<uint32_t>& members,
                                          Deadline deadline) {
  if (wait_for_pushes(lock, step, members, deadline)) {
    add_once(step, members);
    return summed_;
  }
  // Those of a snapshot do not say whose they are.
  if (made_.step != step || !(made_members_.empty() || made_members_ == members)) {
    throw InvalidArgument("the sums of step " + std::to_string(step) + " over these workers are gone; join again");
  }
  return made_;
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
  made_.step = apply.step;
  made_.rows.swap(summed_.rows);
  made_.partials.swap(summed_.partials);
  made_members_ = apply.members;
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

void HeldSums::restore(const Record& record, Statistics made) {
  Pushes::restore(record);
  made_ = std::move(made);
}

}  // namespace muster::server
