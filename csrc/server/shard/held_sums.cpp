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
  const auto present = wait_for_pushes(lock, step, members, deadline);
  if (present) add_once(step, *present);
  const auto& known = present ? summed_ : made_;
  if (known.step != step) {
    throw InvalidArgument("the sums of step " + std::to_string(step) + " were applied and are gone; join again");
  }
  return known;
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
  const auto present = wait_for_pushes(lock, apply.step, apply.members, deadline);
  if (present) make(apply, *present);
}

bool HeldSums::apply_whole(const Apply& apply) {
  if (!has_all(apply.step, apply.members)) return false;
  make(apply, apply.members);
  return true;
}

void HeldSums::make(const Apply& apply, const std::vector<uint32_t>& members) {
  add_once(apply.step, members);
  if (!members.empty()) step(apply, nullptr);
  made_.step = apply.step;
  made_.rows.swap(summed_.rows);
  made_.partials.swap(summed_.partials);
  summed_.step = 0;
  note_made(apply.step);
}

void HeldSums::apply_alone(uint32_t rank, uint64_t incarnation, const Apply& apply) {
  const auto* const given = find_own(rank, incarnation, apply.step);
  if (given == nullptr) return;
  step(apply, given);
  note_applied(rank, incarnation, apply.step);
}

bool HeldSums::skip_to(uint64_t step, const Apply* command) {
  const auto lock = this->lock();
  if (steps() >= step) return false;
  if (command != nullptr && apply_whole(*command)) return true;
  summed_.step = made_.step = 0;
  note_made(step);
  return true;
}

void HeldSums::restore(const Record& record, Statistics made) {
  Pushes::restore(record);
  made_ = std::move(made);
}

}  // namespace muster::server
