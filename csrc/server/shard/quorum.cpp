#include "server/shard/quorum.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "kernels/kernels.h"

namespace muster::server {

void Quorum::configure(const Rules& rules, Time now) {
  rules_ = rules;
  members_.begin_anew(rules.members, now);
  cuts_.configure(rules.cut_every, now);
}

std::vector<uint32_t> Quorum::begin_anew(const Rules& rules, Time now) {
  const auto fenced = members_.begin_anew(rules.members, now);
  paces_.clear();
  rules_ = rules;
  cuts_.configure(rules.cut_every, now);
  return fenced;
}

uint64_t Quorum::greet(uint32_t rank, uint64_t incarnation, uint64_t life, Time now, bool is_of_another_job) {
  const uint64_t before = members_.incarnation(rank);
  const bool had_joined = members_.has_joined(rank);
  const uint64_t greeted = members_.greet(rank, incarnation, life, now, is_of_another_job);
  if (greeted != before || had_joined != members_.has_joined(rank)) forget(rank, now);
  return greeted;
}

void Quorum::leave(uint32_t rank, uint64_t incarnation, Time now) {
  members_.leave(rank, incarnation);
  forget(rank, now);
}

std::vector<uint32_t> Quorum::expire(Time now, Time::duration since_last) {
  auto expired = members_.expire(now, since_last);
  for (const uint32_t rank : expired) forget(rank, now);
  return expired;
}

void Quorum::forget(uint32_t rank, Time now) {
  paces_.erase(rank);
  cuts_.want();
  try_to_decide(now);
}

void Quorum::join(uint32_t rank, uint64_t incarnation, uint64_t step, Time now) {
  const bool is_new = !members_.has_joined(rank);
  members_.join(rank, incarnation, step, now);
  if (!is_new) return;
  paces_[rank].clock = step;
  cuts_.want();
}

uint64_t Quorum::step_of_joiner() const { return rules_.staleness == 0 ? decided_->step : slowest(); }

void Quorum::begin_at(uint64_t step) {
  decided_ = std::make_shared<Decision>(Decision{.step = step});
  cuts_.begin_at(step);
}

uint64_t Quorum::slowest() const {
  constexpr uint64_t kNone = std::numeric_limits<uint64_t>::max();
  uint64_t slowest = kNone;
  uint64_t slowest_working = kNone;
  for (const uint32_t rank : members_.live()) {
    const auto found = paces_.find(rank);
    const Pace pace = found == paces_.end() ? Pace() : found->second;
    slowest = std::min(slowest, pace.progress());
    if (!pace.rests) slowest_working = std::min(slowest_working, pace.progress());
  }
  if (slowest == kNone) return decided_->step;
  return slowest_working == kNone ? slowest : slowest_working;
}

void Quorum::note_rests(uint32_t rank, uint64_t incarnation, bool rests) {
  members_.check_member(rank, incarnation);
  auto& pace = paces_[rank];
  if (!rests) resume(pace);
  pace.rests = rests;
}

void Quorum::resume(Pace& pace) const {
  if (!pace.rests) return;
  pace.excused += std::max(slowest(), pace.progress()) - pace.progress();
  pace.rests = false;
}

Quorum::Progress Quorum::progress(uint32_t rank) const { return {paces_.at(rank).progress(), slowest()}; }

void Quorum::commit(uint32_t rank, uint64_t incarnation, const Commit& commit, Time now) {
  members_.check_member(rank, incarnation);
  auto& pace = paces_[rank];
  if (rules_.staleness != 0) {
    resume(pace);
    pace.clock = std::max(pace.clock, commit.step);
    return;
  }
  const auto& takers = decided_->members;
  const bool took_part = std::find(takers.begin(), takers.end(), rank) != takers.end();
  if (commit.step == decided_->step && took_part) return;
  if (commit.step <= decided_->step) {
    const std::string what = name_of_worker(rank) + " commits step " + std::to_string(commit.step) + ", but step " +
                             std::to_string(decided_->step) + " was decided ";
    if (took_part) throw InvalidArgument(what + "with it; commit each step once");
    throw Fenced(what +
                 "without it: when a server started again it had only just come, or was away for longer than "
                 "the heartbeat deadline. Start it again to join the job as it is then");
  }
  // All that are undecided have one size.
  if (commit_of(other_commit_) == nullptr) {
    const auto other =
        std::find_if(paces_.begin(), paces_.end(), [](const auto& entry) { return entry.second.commit.has_value(); });
    other_commit_ = other == paces_.end() ? rank : other->first;
  }
  const auto* const theirs = commit_of(other_commit_);
  if (theirs != nullptr && theirs->numbers.size() != commit.numbers.size()) {
    throw LayoutMismatch(name_of_worker(rank) + " commits " + std::to_string(commit.numbers.size()) + " numbers, " +
                         name_of_worker(other_commit_) + " " + std::to_string(theirs->numbers.size()) +
                         "; run the same program on all workers");
  }
  cuts_.note_complete(commit.cut, now);
  if (commit.log_is_full) cuts_.demand();
  pace.clock = commit.step;
  pace.commit = commit;
  try_to_decide(now);
}

const Commit* Quorum::commit_of(uint32_t rank) const {
  const auto found = paces_.find(rank);
  return found != paces_.end() && found->second.commit ? &*found->second.commit : nullptr;
}

bool Quorum::lacks_commit(uint32_t rank) const {
  const auto& live = members_.live();
  return commit_of(rank) == nullptr && std::binary_search(live.begin(), live.end(), rank);
}

// Once every live member has committed one and the same step.
void Quorum::try_to_decide(Time now) {
  if (rules_.staleness != 0 || members_.awaits_unknown(now) || lacks_commit(awaited_)) return;
  std::vector<const void*> sources;
  Decision decision;
  std::unordered_map<std::string_view, uint32_t> records;  // among many workers most are the same
  size_t count = 0;
  for (const uint32_t rank : members_.live()) {
    const auto* const commit = commit_of(rank);
    if (commit == nullptr) {
      awaited_ = rank;
      return;
    }
    if (!decision.members.empty() && commit->step != decision.step) return;
    decision.step = commit->step;
    decision.members.push_back(rank);
    const auto [record, is_new] = records.try_emplace(commit->record, static_cast<uint32_t>(records.size()));
    if (is_new) decision.records.push_back(commit->record);
    decision.record_of.push_back(record->second);
    count = commit->numbers.size();
    sources.resize(rank + 1);
    sources[rank] = commit->numbers.data();
  }
  if (decision.members.empty()) return;
  decision.next_members = decision.members;
  decision.numbers.resize(count);
  void* destination = decision.numbers.data();
  kernels::tree_reduce(kernels::DType::f64, kernels::Reduction::sum, sources.data(), static_cast<int>(sources.size()),
                       &destination, 1, count);
  decision.cut = cuts_.decide(decision.step, now);
  decided_ = std::make_shared<Decision>(std::move(decision));
  for (auto& [rank, pace] : paces_) pace.commit.reset();
}

bool Quorum::may_go_on(const Pace& pace, uint64_t step) const {
  return rules_.staleness == kAnyStaleness || step + pace.excused <= slowest() + rules_.staleness;
}

std::shared_ptr<const Decision> Quorum::decision(uint32_t rank, uint64_t step) const {
  if (rules_.staleness == 0) {
    return decided_->step == step ? decided_ : nullptr;
  }
  if (!may_go_on(paces_.at(rank), step)) return nullptr;
  return std::make_shared<Decision>(Decision{.step = step, .members = {rank}, .next_members = members_.live()});
}

std::shared_ptr<const std::string> Quorum::encoded_decision(uint32_t rank, uint64_t step) {
  auto known = decision(rank, step);
  if (known == nullptr) return nullptr;
  if (known != encoded_) {
    encoding_ = std::make_shared<const std::string>(encode(*known));
    encoded_ = std::move(known);
  }
  return encoding_;
}

std::string Quorum::missing(uint32_t rank, uint64_t step) const {
  const uint64_t excused = paces_.at(rank).excused;
  std::string names;
  for (const uint32_t other : members_.live()) {
    const auto found = paces_.find(other);
    const Pace pace = found == paces_.end() ? Pace() : found->second;
    const bool is_there = members_.has_joined(other) && pace.progress() + rules_.staleness >= step + excused;
    if (pace.rests || is_there) continue;
    names += (names.empty() ? "" : ", ") + name_of_worker(other);
  }
  return names;
}

void Quorum::recall(const Decision& decision, Time now) {
  members_.await(decision.next_members, now);
  take(decision);
}

void Quorum::recall(uint64_t step) { take(Decision{.step = step}); }

void Quorum::take(const Decision& decision) {
  if (rules_.staleness != 0 || decision.step <= decided_->step) return;
  decided_ = std::make_shared<Decision>(decision);
  if (!decision.members.empty()) members_.note_makers(decision.members, decision.step);
  for (auto& [rank, pace] : paces_) {
    if (pace.clock <= decided_->step) pace.commit.reset();
  }
}

Quorum::Record Quorum::record() const {
  Record record;
  record.members = members_.record();
  record.decision = *decided_;
  for (const uint32_t rank : record.members.ranks) {
    const auto found = paces_.find(rank);
    const Pace pace = found == paces_.end() ? Pace() : found->second;
    record.clocks.push_back(pace.clock);
    record.excused.push_back(pace.excused);
    record.rests.push_back(pace.rests ? 1 : 0);
  }
  return record;
}

void Quorum::restore(const Record& record, Time now) {
  const size_t count = record.members.ranks.size();
  if (record.clocks.size() != count || record.excused.size() != count || record.rests.size() != count) {
    throw CheckpointError("a snapshot's list of workers is damaged; use an older snapshot");
  }
  // All that were awaited had come when their job decided a step.
  members_.restore(record.members, /*awaits_all=*/record.decision.step == 0 || count == 0, now);
  paces_.clear();
  decided_ = std::make_shared<Decision>(record.decision);
  for (size_t i = 0; i < count; ++i) {
    paces_[record.members.ranks[i]] = {record.clocks[i], record.excused[i], record.rests[i] != 0, {}};
  }
}

}  // namespace muster::server
