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

constexpr const char* kStartAgain =
    "Start all workers again: every server then goes on from the last step that all have snapshots of";

}  // namespace

std::shared_ptr<const Apply> Steps::command_of(uint64_t step) const {
  const std::lock_guard lock(mutex_);
  return command_ && command_->step == step ? command_ : nullptr;
}

std::shared_ptr<const Apply> Steps::command() const {
  const std::lock_guard lock(mutex_);
  return command_;
}

void Steps::note_command(const Apply& command) {
  const std::lock_guard lock(mutex_);
  if (command_ && command_->step >= command.step) {
    const bool is_other = command_->step == command.step && command_->members != command.members;
    if (!is_other) return;
    throw CheckpointError("step " + std::to_string(command.step) + " is to be made of the parts of workers " +
                          text_of(command.members) + ", but this server makes it of those of workers " +
                          text_of(command_->members) + ", as somebody who is gone said. " + kStartAgain);
  }
  if (is_closed_) throw Fenced("another job has begun on these parameter servers; what this one computes is lost");
  command_ = std::make_shared<const Apply>(command);
}

void Steps::close() {
  const std::lock_guard lock(mutex_);
  is_closed_ = true;
}

void Steps::open(uint64_t step) {
  const std::lock_guard lock(mutex_);
  if (command_ && command_->step > step) command_ = nullptr;
  is_closed_ = false;
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

bool Pushes::would_hold(uint32_t rank, uint64_t incarnation, const Portion& part, std::span<const int64_t> rows) const {
  if (is_applied(rank, incarnation, part.step)) return false;
  const auto dropped = dropped_.find(rank);
  if (dropped != dropped_.end() && incarnation <= dropped->second) return false;
  size_t others = 0;
  for (const auto& [step, of_step] : held_) {
    const auto found = of_step.find(rank);
    const bool is_own = found != of_step.end() && found->second.incarnation == incarnation;
    others += step != part.step && is_own ? 1 : 0;
  }
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
  return true;
}

bool Pushes::hold(uint32_t rank, uint64_t incarnation, const Portion& part, std::span<const int64_t> rows, Bytes values,
                  std::shared_ptr<const void> owner) {
  if (!would_hold(rank, incarnation, part, rows)) return false;
  auto& contribution = held_[part.step][rank];
  if (contribution.incarnation != incarnation) {
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
  events_.notify_all();
  return true;
}

const WorkerSums* Pushes::find(uint64_t step, uint32_t rank) const {
  const auto held = held_.find(step);
  if (held == held_.end()) return nullptr;
  const auto found = held->second.find(rank);
  return found != held->second.end() && found->second.is_whole() ? &found->second : nullptr;
}

bool Pushes::has_all(uint64_t step, const std::vector<uint32_t>& ranks) const {
  if (steps_ + 1 != step) return false;
  const auto held = held_.find(step);
  const size_t givers = held == held_.end() ? 0 : held->second.size();
  return givers >= ranks.size() &&
         std::all_of(ranks.begin(), ranks.end(), [&](uint32_t rank) { return find(step, rank) != nullptr; });
}

void Pushes::wait(Lock& lock, Deadline deadline, const std::string& what, const std::function<bool()>& ready) {
  for (;;) {
    const uint64_t seen = events_.count();
    if (ready()) return;
    if (rules_.stopped) throw CommError("the parameter server ends; start it again, or end the job");
    lock.unlock();
    const bool is_late = !events_.wait_beyond(seen, deadline, rules_.time);
    lock.lock();
    if (is_late && !ready()) {
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
    return command != nullptr || (rules_.is_synchronous && is_stuck());
  });
  if (steps_ >= at_least) return nullptr;
  if (command == nullptr) refuse_to_go_on(at_least);
  return command;
}

void Pushes::refuse_to_go_on(uint64_t last) const {
  const std::string first = std::to_string(steps_ + 1);
  const std::string lost = last > steps_ + 1 ? "steps " + first + " to " + std::to_string(last) : "step " + first;
  throw CheckpointError("this parameter server goes on after step " + std::to_string(steps_) +
                        ", and nobody has the parts of " + lost + " any more. " + kStartAgain);
}

bool Pushes::wait_for_pushes(Lock& lock, uint64_t step, const std::vector<uint32_t>& members, Deadline deadline) {
  wait(lock, deadline, "the step before", [&] { return steps_ + 1 >= step || is_stuck(); });
  if (steps_ + 1 < step) refuse_to_go_on(step - 1);
  std::vector<uint32_t> missing;
  std::vector<uint32_t> lost;
  wait(lock, deadline, "pushes of step " + std::to_string(step) + " from workers " + text_of(members), [&] {
    if (steps_ >= step) return true;  // another thread had all of them, and they are gone
    missing.clear();
    lost.clear();
    for (const uint32_t rank : members) {
      if (find(step, rank) != nullptr) continue;
      missing.push_back(rank);
      if (!rules_.may_push(rank, step)) lost.push_back(rank);
    }
    return missing.empty() || !lost.empty();
  });
  if (steps_ >= step) return false;
  if (missing.empty()) return true;
  throw CheckpointError("this parameter server has no part of step " + std::to_string(step) + " from workers " +
                        text_of(lost) + ", who are gone, and others made the step with it. " + kStartAgain);
}

void Pushes::note_made(uint64_t step) {
  steps_ = step;
  const auto end = held_.upper_bound(step);
  for (auto held = held_.begin(); held != end; ++held) {
    for (const auto& [rank, contribution] : held->second) rules_.held_bytes -= contribution.bytes;
  }
  held_.erase(held_.begin(), end);
  events_.notify_all();
}

const WorkerSums* Pushes::find_own(uint32_t rank, uint64_t incarnation, uint64_t step) {
  if (is_applied(rank, incarnation, step)) return nullptr;
  const auto* const own = find(step, rank);
  if (own != nullptr && own->incarnation == incarnation) return own;
  throw InvalidArgument("worker " + std::to_string(rank) + " applies step " + std::to_string(step) +
                        " without having pushed all of it");
}

void Pushes::note_applied(uint32_t rank, uint64_t incarnation, uint64_t step) {
  {
    const std::lock_guard marking(marks_mutex_);
    marks_[rank] = {incarnation, step};
  }
  ++steps_;
  const auto held = held_.find(step);
  const auto found = held->second.find(rank);
  rules_.held_bytes -= found->second.bytes;
  held->second.erase(found);
  if (held->second.empty()) held_.erase(held);
  events_.notify_all();
}

void Pushes::drop(uint32_t rank, uint64_t incarnation) {
  auto& dropped = dropped_[rank];
  dropped = std::max(dropped, incarnation);
  for (auto held = held_.begin(); held != held_.end();) {
    const auto found = held->second.find(rank);
    if (found != held->second.end() && found->second.incarnation <= incarnation) {
      rules_.held_bytes -= found->second.bytes;
      held->second.erase(found);
    }
    held = held->second.empty() ? held_.erase(held) : std::next(held);
  }
}

void Pushes::drop_all() {
  for (const auto& [step, of_step] : held_) {
    for (const auto& [rank, contribution] : of_step) rules_.held_bytes -= contribution.bytes;
  }
  held_.clear();
}

uint64_t Pushes::step_of(uint32_t rank, uint64_t incarnation) const {
  if (rules_.is_synchronous) return steps_;
  const std::lock_guard reading(marks_mutex_);
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
  const std::lock_guard marking(marks_mutex_);
  for (size_t i = 0; i < record.ranks.size(); ++i) {
    marks_[record.ranks[i]] = {record.incarnations.at(i), record.applied.at(i)};
  }
}

}  // namespace muster::server
