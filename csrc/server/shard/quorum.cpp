#include "server/shard/quorum.h"

#include <algorithm>
#include <limits>

#include "kernels/kernels.h"

namespace muster::server {

namespace {

std::string name_of(uint32_t rank) { return "worker " + std::to_string(rank); }

uint64_t microseconds_of_wall_clock() {
  using std::chrono::duration_cast;
  using std::chrono::microseconds;
  return static_cast<uint64_t>(
      duration_cast<microseconds>(std::chrono::system_clock::now().time_since_epoch()).count());
}

}  // namespace

void Quorum::configure(const Rules& rules, Time now) {
  rules_ = rules;
  for (uint32_t rank = 0; rank < rules.workers; ++rank) {
    auto& member = members_[rank];
    member.live = true;
    member.seen = now;
  }
}

std::vector<uint32_t> Quorum::begin_anew(const Rules& rules, Time now) {
  std::vector<uint32_t> fenced;
  for (auto& [rank, member] : members_) {
    if (member.joined) {
      fenced.push_back(rank);
      const uint64_t incarnation = member.incarnation;
      member = Member{};
      member.incarnation = incarnation;
      member.dead = true;
    }
    member.live = member.came = false;  // a worker of this job that came already gives signs of life
  }
  configure(rules, now);
  return fenced;
}

uint64_t Quorum::greet(uint32_t rank, uint64_t incarnation, Time now) {
  if (rank >= kMaxWorkers) throw InvalidArgument(name_of(rank) + " is out of range; ranks count from 0");
  const auto found = members_.find(rank);
  if (found == members_.end()) {
    if (incarnation == 0) incarnation = microseconds_of_wall_clock();
    auto& member = members_[rank];
    member.incarnation = incarnation;
    member.give_sign(now);
    return incarnation;
  }
  auto& member = found->second;
  if (incarnation == 0) incarnation = std::max(member.incarnation + 1, microseconds_of_wall_clock());
  if (incarnation > member.incarnation) {
    const bool is_awaited = member.live && !member.joined;
    member = Member{};
    member.incarnation = incarnation;
    member.live = is_awaited;
    member.give_sign(now);
    try_to_decide();
  } else {
    touch(rank, incarnation, now);
  }
  return incarnation;
}

Quorum::Member& Quorum::known(uint32_t rank, uint64_t incarnation) {
  const auto found = members_.find(rank);
  if (found == members_.end() || found->second.incarnation != incarnation || found->second.dead) {
    throw Fenced(name_of(rank) + " (incarnation " + std::to_string(incarnation) +
                 ") was replaced by another, or was silent for longer than the heartbeat deadline; what it computes "
                 "no longer counts. Start it again to join the job as it is then");
  }
  return found->second;
}

void Quorum::join(uint32_t rank, uint64_t incarnation, uint64_t step, Time now) {
  auto& member = known(rank, incarnation);
  member.give_sign(now);
  if (member.joined) return;
  member.joined = member.live = true;
  member.joined_at = member.clock = step;
}

uint64_t Quorum::step_of_joiner() const { return rules_.staleness == 0 ? decided_.step : slowest(); }

void Quorum::begin_at(uint64_t step) { decided_.step = std::max(decided_.step, step); }

bool Quorum::is_member(uint32_t rank, uint64_t incarnation) const {
  const auto found = members_.find(rank);
  return found != members_.end() && found->second.incarnation == incarnation && found->second.live &&
         found->second.joined;
}

bool Quorum::is_gone(uint32_t rank) const {
  const auto found = members_.find(rank);
  return found != members_.end() && found->second.dead && !found->second.live;
}

uint64_t Quorum::slowest() const {
  constexpr uint64_t kNone = std::numeric_limits<uint64_t>::max();
  uint64_t slowest = kNone;
  uint64_t slowest_working = kNone;
  for (const auto& [rank, member] : members_) {
    if (!member.live) continue;
    slowest = std::min(slowest, member.progress());
    if (!member.rests) slowest_working = std::min(slowest_working, member.progress());
  }
  if (slowest == kNone) return decided_.step;
  return slowest_working == kNone ? slowest : slowest_working;
}

void Quorum::note_rests(uint32_t rank, uint64_t incarnation, bool rests) {
  auto& member = known(rank, incarnation);
  if (!rests) resume(member);
  member.rests = rests;
}

void Quorum::resume(Member& member) const {
  if (!member.rests) return;
  member.excused += std::max(slowest(), member.progress()) - member.progress();
  member.rests = false;
}

Quorum::Progress Quorum::progress(uint32_t rank) const { return {members_.at(rank).progress(), slowest()}; }

void Quorum::touch(uint32_t rank, uint64_t incarnation, Time now) { known(rank, incarnation).give_sign(now); }

void Quorum::leave(uint32_t rank, uint64_t incarnation) {
  auto& member = known(rank, incarnation);
  member.live = false;
  member.dead = true;
  member.commit.reset();
  try_to_decide();
}

std::vector<uint32_t> Quorum::expire(Time now, Time::duration since_last) {
  constexpr std::chrono::seconds kStandstill{1};
  const bool stood_still = since_last > std::min<Time::duration>(kStandstill, rules_.heartbeat / 2);
  std::vector<uint32_t> expired;
  for (auto& [rank, member] : members_) {
    // Some of the signs that came meanwhile have been looked at.
    if (stood_still) member.seen = std::min(member.seen + since_last, now);
    if (!member.live || now - member.seen <= (member.came ? rules_.heartbeat : rules_.timeout)) continue;
    member.live = false;
    member.dead = true;
    member.commit.reset();
    expired.push_back(rank);
  }
  if (!expired.empty()) try_to_decide();
  return expired;
}

std::vector<uint32_t> Quorum::live() const {
  std::vector<uint32_t> ranks;
  for (const auto& [rank, member] : members_) {
    if (member.live) ranks.push_back(rank);
  }
  return ranks;
}

bool Quorum::may_push(uint32_t rank, uint64_t step) const {
  const auto found = members_.find(rank);
  return found != members_.end() && found->second.live && (!found->second.joined || found->second.joined_at < step);
}

std::vector<uint32_t> Quorum::pushers(uint64_t step) const {
  std::vector<uint32_t> ranks = live();
  std::erase_if(ranks, [&](uint32_t rank) { return !may_push(rank, step); });
  return ranks;
}

bool Quorum::has_senior(uint32_t rank, const std::vector<uint32_t>& members) const {
  const auto own = members_.find(rank);
  return std::any_of(members.begin(), members.end(), [&](uint32_t other) {
    const auto found = members_.find(other);
    return own != members_.end() && found != members_.end() && found->second.live && found->second.joined &&
           found->second.joined_at < own->second.joined_at;
  });
}

void Quorum::commit(uint32_t rank, uint64_t incarnation, const Commit& commit) {
  auto& member = known(rank, incarnation);
  if (!member.joined) throw InvalidArgument(name_of(rank) + " commits a step before it has joined");
  if (rules_.staleness != 0) {
    resume(member);
    member.clock = std::max(member.clock, commit.step);
    return;
  }
  if (commit.step == decided_.step && commit.step > 0) return;
  if (commit.step < decided_.step) {
    throw InvalidArgument(name_of(rank) + " commits step " + std::to_string(commit.step) + ", but step " +
                          std::to_string(decided_.step) + " was decided; join again");
  }
  for (const auto& [other, theirs] : members_) {
    if (!theirs.commit || theirs.commit->numbers.size() == commit.numbers.size()) continue;
    throw LayoutMismatch(name_of(rank) + " commits " + std::to_string(commit.numbers.size()) + " numbers, " +
                         name_of(other) + " " + std::to_string(theirs.commit->numbers.size()) +
                         "; run the same program on all workers");
  }
  member.clock = commit.step;
  member.commit = commit;
  try_to_decide();
}

// Once every live member has committed one and the same step.
void Quorum::try_to_decide() {
  if (rules_.staleness != 0) return;
  std::vector<const void*> sources;
  Decision decision;
  size_t count = 0;
  for (const auto& [rank, member] : members_) {
    if (!member.live) continue;
    if (!member.commit || (!decision.members.empty() && member.clock != decision.step)) return;
    decision.step = member.clock;
    decision.members.push_back(rank);
    decision.records.push_back(member.commit->record);
    count = member.commit->numbers.size();
    sources.resize(rank + 1);
    sources[rank] = member.commit->numbers.data();
  }
  if (decision.members.empty()) return;
  decision.next_members = decision.members;
  decision.numbers.resize(count);
  void* destination = decision.numbers.data();
  kernels::tree_reduce(kernels::DType::f64, kernels::Reduction::sum, sources.data(), static_cast<int>(sources.size()),
                       &destination, 1, count);
  decided_ = std::move(decision);
  for (auto& [rank, member] : members_) member.commit.reset();
}

bool Quorum::may_go_on(const Member& member, uint64_t step) const {
  return rules_.staleness == kAnyStaleness || step + member.excused <= slowest() + rules_.staleness;
}

std::optional<Decision> Quorum::decision(uint32_t rank, uint64_t step) const {
  if (rules_.staleness == 0) {
    if (decided_.step != step) return std::nullopt;
    return decided_;
  }
  if (!may_go_on(members_.at(rank), step)) return std::nullopt;
  return Decision{step, {rank}, live(), {}, {}};
}

std::string Quorum::missing(uint32_t rank, uint64_t step) const {
  const auto& waiting = members_.at(rank);
  std::string names;
  for (const auto& [other, member] : members_) {
    const bool is_there = member.joined && member.progress() + rules_.staleness >= step + waiting.excused;
    if (!member.live || member.rests || is_there) continue;
    names += (names.empty() ? "" : ", ") + name_of(other);
  }
  return names;
}

void Quorum::recall(const Decision& decision) {
  if (rules_.staleness != 0 || decision.step <= decided_.step) return;
  decided_ = decision;
  for (auto& [rank, member] : members_) {
    if (member.clock <= decided_.step) member.commit.reset();
  }
}

Quorum::Record Quorum::record() const {
  Record record;
  record.decision = decided_;
  for (const auto& [rank, member] : members_) {
    if (!member.joined) continue;
    record.ranks.push_back(rank);
    record.incarnations.push_back(member.incarnation);
    record.joined_at.push_back(member.joined_at);
    record.clocks.push_back(member.clock);
    record.excused.push_back(member.excused);
    record.live.push_back(member.live ? 1 : 0);
    record.rests.push_back(member.rests ? 1 : 0);
  }
  return record;
}

void Quorum::restore(const Record& record, Time now) {
  const size_t count = record.ranks.size();
  if (record.incarnations.size() != count || record.joined_at.size() != count || record.clocks.size() != count ||
      record.excused.size() != count || record.live.size() != count || record.rests.size() != count) {
    throw CheckpointError("a snapshot's list of workers is damaged; use an older snapshot");
  }
  members_.clear();
  decided_ = record.decision;
  for (size_t i = 0; i < count; ++i) {
    auto& member = members_[record.ranks[i]];
    member.incarnation = record.incarnations[i];
    member.joined_at = record.joined_at[i];
    member.clock = record.clocks[i];
    member.excused = record.excused[i];
    member.live = record.live[i] != 0;
    member.rests = record.rests[i] != 0;
    member.dead = !member.live;
    member.joined = true;
    member.give_sign(now);
  }
}

}  // namespace muster::server
