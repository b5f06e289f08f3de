#include "server/shard/pushes.h"

#include <algorithm>
#include <string>
#include <utility>

namespace muster::server {

namespace {

std::string text_of(const std::vector<uint32_t>& ranks) {
  std::string text;
  for (const uint32_t rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

[[noreturn]] void refuse(uint32_t rank, uint64_t step, const std::string& what) {
  throw InvalidArgument("worker " + std::to_string(rank) + "'s push of step " + std::to_string(step) + " " + what);
}

}  // namespace

std::shared_ptr<const Apply> Steps::command_of(uint64_t step) const {
  const std::lock_guard lock(mutex_);
  return command_ && command_->step == step ? command_ : nullptr;
}

void Steps::note_command(const Apply& command) {
  const std::lock_guard lock(mutex_);
  if (!command_ || command_->step < command.step) command_ = std::make_shared<const Apply>(command);
}

uint64_t Steps::commanded() const {
  const std::lock_guard lock(mutex_);
  return command_ ? command_->step : 0;
}

bool Pushes::is_applied(uint32_t rank, uint64_t incarnation, uint64_t step) const {
  if (rules_.is_synchronous) return step <= steps_;
  const auto found = marks_.find(rank);
  if (found == marks_.end()) return false;
  const auto& mark = found->second;
  return mark.incarnation > incarnation || (mark.incarnation == incarnation && step <= mark.step);
}

bool Pushes::hold(uint32_t rank, uint64_t incarnation, const Portion& part, const std::vector<int64_t>& rows,
                  Bytes values, std::shared_ptr<const void> owner) {
  if (is_applied(rank, incarnation, part.step)) return false;
  size_t others = 0;
  for (const auto& [step, of_step] : held_) others += step != part.step && of_step.contains(rank) ? 1 : 0;
  if (others >= kMaxHeld) refuse(rank, part.step, "came before earlier ones were applied; apply each step first");
  const WorkerSums none;
  const WorkerSums* known = &none;
  if (const auto held = held_.find(part.step); held != held_.end()) {
    const auto found = held->second.find(rank);
    if (found != held->second.end()) known = &found->second;
  }
  if (known->incarnation > incarnation) return false;
  const bool goes_on = known->incarnation == incarnation;
  const size_t next = goes_on ? known->parts.size() : 0;
  if (part.index < next) return false;
  if (part.index != next || part.index >= part.count || (goes_on && known->num_parts != part.count)) {
    refuse(rank, part.step, "came in other parts than it said; send them in order");
  }
  bool ascends = std::adjacent_find(rows.begin(), rows.end(), std::greater_equal<>()) == rows.end();
  if (goes_on && !known->rows.empty() && !rows.empty()) ascends = ascends && known->rows.back() < rows.front();
  if (!ascends) refuse(rank, part.step, "has rows that do not ascend; sum the gradients of each row first");

  auto& contribution = held_[part.step][rank];
  if (!goes_on) {
    rules_.held_bytes -= contribution.bytes;
    contribution = WorkerSums();
    contribution.incarnation = incarnation;
    contribution.num_parts = part.count;
  }
  const auto bytes = static_cast<int64_t>(values.size() + rows.size() * sizeof(int64_t));
  contribution.parts.push_back({rows.size(), values, std::move(owner)});
  contribution.rows.insert(contribution.rows.end(), rows.begin(), rows.end());
  contribution.bytes += bytes;
  rules_.held_bytes += bytes;
  changed_.notify_all();
  return true;
}

const WorkerSums* Pushes::find(uint64_t step, uint32_t rank) const {
  const auto held = held_.find(step);
  if (held == held_.end()) return nullptr;
  const auto found = held->second.find(rank);
  return found != held->second.end() && found->second.is_whole() ? &found->second : nullptr;
}

bool Pushes::has_all(uint64_t step, const std::vector<uint32_t>& ranks) const {
  return steps_ + 1 == step &&
         std::all_of(ranks.begin(), ranks.end(), [&](uint32_t rank) { return find(step, rank) != nullptr; });
}

void Pushes::wait(Lock& lock, Deadline deadline, const std::string& what, const std::function<bool()>& ready) {
  while (!ready()) {
    if (rules_.stopped) throw CommError("the parameter server ends; start it again, or end the job");
    if (changed_.wait_until(lock, deadline) == std::cv_status::timeout && !ready()) {
      throw Timeout("a parameter server waited too long for " + what +
                    "; look at the logs of the workers, and raise timeout if they are slow");
    }
  }
}

std::shared_ptr<const Apply> Pushes::wait_for_steps(Lock& lock, uint64_t at_least, Deadline deadline) {
  std::shared_ptr<const Apply> command;
  wait(lock, deadline, "a step to be applied", [&] {
    if (steps_ >= at_least) return true;
    command = rules_.command_of(at_least);
    return command != nullptr;
  });
  return steps_ >= at_least ? nullptr : command;
}

std::optional<std::vector<uint32_t>> Pushes::wait_for_pushes(Lock& lock, uint64_t step,
                                                             const std::vector<uint32_t>& members, Deadline deadline) {
  wait(lock, deadline, "the step before", [&] { return steps_ + 1 >= step; });
  std::vector<uint32_t> present;
  wait(lock, deadline, "pushes of step " + std::to_string(step) + " from workers " + text_of(members), [&] {
    if (steps_ >= step) return true;  // another thread had all of them, and they are gone
    present.clear();
    bool is_complete = true;
    for (const uint32_t rank : members) {
      if (find(step, rank) != nullptr) {
        present.push_back(rank);
      } else {
        is_complete = is_complete && !rules_.may_push(rank, step);
      }
    }
    return is_complete;
  });
  if (steps_ >= step) return std::nullopt;
  return present;
}

void Pushes::note_made(uint64_t step) {
  steps_ = step;
  const auto end = held_.upper_bound(step);
  for (auto held = held_.begin(); held != end; ++held) {
    for (const auto& [rank, contribution] : held->second) rules_.held_bytes -= contribution.bytes;
  }
  held_.erase(held_.begin(), end);
  changed_.notify_all();
}

const WorkerSums* Pushes::find_own(uint32_t rank, uint64_t incarnation, uint64_t step) {
  if (is_applied(rank, incarnation, step)) return nullptr;
  const auto* const own = find(step, rank);
  if (own != nullptr && own->incarnation == incarnation) return own;
  throw InvalidArgument("worker " + std::to_string(rank) + " applies step " + std::to_string(step) +
                        " without having pushed all of it");
}

void Pushes::note_applied(uint32_t rank, uint64_t incarnation, uint64_t step) {
  marks_[rank] = {incarnation, step};
  ++steps_;
  const auto held = held_.find(step);
  const auto found = held->second.find(rank);
  rules_.held_bytes -= found->second.bytes;
  held->second.erase(found);
  if (held->second.empty()) held_.erase(held);
  changed_.notify_all();
}

void Pushes::drop(uint32_t rank) {
  for (auto held = held_.begin(); held != held_.end();) {
    const auto found = held->second.find(rank);
    if (found != held->second.end()) {
      rules_.held_bytes -= found->second.bytes;
      held->second.erase(found);
    }
    held = held->second.empty() ? held_.erase(held) : std::next(held);
  }
}

uint64_t Pushes::step_of(uint32_t rank, uint64_t incarnation) const {
  if (rules_.is_synchronous) return steps_;
  const auto mark = marks_.find(rank);
  return mark != marks_.end() && mark->second.incarnation == incarnation ? mark->second.step : 0;
}

Pushes::Record Pushes::record() const {
  Record record;
  record.steps = steps_;
  for (const auto& [rank, mark] : marks_) {
    record.ranks.push_back(rank);
    record.incarnations.push_back(mark.incarnation);
    record.applied.push_back(mark.step);
  }
  return record;
}

void Pushes::restore(const Record& record) {
  steps_ = record.steps;
  for (size_t i = 0; i < record.ranks.size(); ++i) {
    marks_[record.ranks[i]] = {record.incarnations.at(i), record.applied.at(i)};
  }
}

}  // namespace muster::server
