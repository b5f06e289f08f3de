#include "server/shard/members.h"

#include <algorithm>
#include <utility>

namespace muster::server {

std::string name_of_worker(uint32_t rank) { return "worker " + std::to_string(rank); }

void Members::configure(const Rules& rules, Time now) {
  forget_lists();
  rules_ = rules;
  for (uint32_t rank = 0; rank < rules.workers; ++rank) {
    auto& member = members_[rank];
    member.live = true;
    member.seen = now;
  }
}

std::vector<uint32_t> Members::begin_anew(const Rules& rules, Time now) {
  forget_lists();
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
  unknown_until_ = {};
  expected_.clear();
  configure(rules, now);
  return fenced;
}

uint64_t Members::greet(uint32_t rank, uint64_t incarnation, uint64_t life, Time now, bool is_of_another_job) {
  if (rank >= kMaxWorkers) throw InvalidArgument(name_of_worker(rank) + " is out of range; ranks count from 0");
  const uint64_t before = this->incarnation(rank);
  if (incarnation == 0) incarnation = std::max(before, life << 32) + 1;
  const auto* const known = find(rank);
  // Server 0 counts incarnations: jobs that began with different ones may have the same.
  const bool is_namesake =
      known != nullptr && known->is_of_snapshot && is_of_another_job && incarnation == known->incarnation;
  if (known != nullptr && incarnation <= before && !is_namesake) {
    touch(rank, incarnation, now);
    return incarnation;
  }
  forget_lists();
  auto& member = members_[rank];
  const bool is_awaited = member.live && !member.joined;
  member = Member{};
  member.incarnation = incarnation;
  // After a restart it may be one that this server has forgotten.
  member.live = is_awaited || awaits_unknown(now);
  member.give_sign(now);
  return incarnation;
}

void Members::forget_joined() {
  forget_lists();
  std::erase_if(members_, [](const auto& entry) { return entry.second.joined; });
}

const Members::Member* Members::find(uint32_t rank) const noexcept {
  const auto found = members_.find(rank);
  return found == members_.end() ? nullptr : &found->second;
}

uint64_t Members::incarnation(uint32_t rank) const noexcept {
  const auto* const member = find(rank);
  return member == nullptr ? 0 : member->incarnation;
}

const Members::Member& Members::known(uint32_t rank, uint64_t incarnation) const {
  const auto* const member = find(rank);
  if (member == nullptr || member->incarnation != incarnation || member->dead) {
    throw Fenced(name_of_worker(rank) + " (incarnation " + std::to_string(incarnation) +
                 ") was replaced by another, or was silent for longer than the heartbeat deadline; what it computes "
                 "no longer counts. Start it again to join the job as it is then");
  }
  return *member;
}

Members::Member& Members::known(uint32_t rank, uint64_t incarnation) {
  return const_cast<Member&>(std::as_const(*this).known(rank, incarnation));
}

void Members::check_member(uint32_t rank, uint64_t incarnation) const {
  if (!known(rank, incarnation).joined) {
    throw InvalidArgument(name_of_worker(rank) + " takes part in a step before it has joined");
  }
}

bool Members::has_left(uint32_t rank, uint64_t incarnation) const noexcept {
  const auto* const member = find(rank);
  return member != nullptr && member->incarnation == incarnation && member->left;
}

void Members::join(uint32_t rank, uint64_t incarnation, uint64_t step, Time now) {
  if (has_left(rank, incarnation)) return;
  auto& member = known(rank, incarnation);
  member.give_sign(now);
  if (member.joined) return;
  forget_lists();
  member.joined = member.live = true;
  member.joined_at = step;
  member.first = step + 1;
}

void Members::note_return(uint32_t rank, uint64_t incarnation, uint64_t first) {
  forget_lists();
  if (has_left(rank, incarnation)) return;
  auto& member = known(rank, incarnation);
  member.first = std::max(member.joined_at + 1, first);
  member.returned = true;
  member.is_of_snapshot = false;
  const auto is_back = [&](uint32_t other) { return members_.at(other).returned; };
  if (!expected_.empty() && std::all_of(expected_.begin(), expected_.end(), is_back)) unknown_until_ = {};
}

std::optional<uint32_t> Members::awaits_return() const noexcept {
  for (const auto& [rank, member] : members_) {
    if (member.live && member.is_of_snapshot) return rank;
  }
  return std::nullopt;
}

void Members::await(const std::vector<uint32_t>& ranks, Time now) {
  forget_lists();
  if (!awaits_unknown(now)) return;
  for (auto& [rank, member] : members_) {
    const bool is_expected = std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
    member.live = member.live && (member.came || is_expected);
  }
  for (const uint32_t rank : ranks) {
    expected_.insert(rank);
    const auto [member, is_new] = members_.try_emplace(rank);
    if (!is_new) continue;
    member->second.live = true;
    member->second.give_sign(now);
  }
}

void Members::note_makers(const std::vector<uint32_t>& ranks, uint64_t step) {
  forget_lists();
  for (auto& [rank, member] : members_) {
    if (!member.joined || member.joined_at >= step || std::binary_search(ranks.begin(), ranks.end(), rank)) continue;
    member.live = false;
    member.dead = true;
  }
}

void Members::touch(uint32_t rank, uint64_t incarnation, Time now) {
  if (!has_left(rank, incarnation)) known(rank, incarnation).give_sign(now);
}

void Members::leave(uint32_t rank, uint64_t incarnation) {
  forget_lists();
  if (has_left(rank, incarnation)) return;
  auto& member = known(rank, incarnation);
  member.live = false;
  member.dead = member.left = true;
}

std::vector<uint32_t> Members::expire(Time now, Time::duration since_last) {
  constexpr std::chrono::seconds kStandstill{1};
  const bool stood_still = since_last > std::min<Time::duration>(kStandstill, rules_.heartbeat / 2);
  if (stood_still && now < unknown_until_ + since_last) unknown_until_ += since_last;
  std::vector<uint32_t> expired;
  for (auto& [rank, member] : members_) {
    // Some of the signs that came meanwhile have been looked at.
    if (stood_still) member.seen = std::min(member.seen + since_last, now);
    if (!member.live || now - member.seen <= (member.came ? rules_.heartbeat : rules_.timeout)) continue;
    forget_lists();
    member.live = false;
    member.dead = true;
    expired.push_back(rank);
  }
  return expired;
}

const std::vector<uint32_t>& Members::live() const {
  if (live_) return *live_;
  auto& ranks = live_.emplace();
  for (const auto& [rank, member] : members_) {
    if (member.live) ranks.push_back(rank);
  }
  return ranks;
}

bool Members::has_joined(uint32_t rank) const noexcept {
  const auto* const member = find(rank);
  return member != nullptr && member->joined;
}

std::vector<uint32_t> Members::present(Time since) const {
  std::vector<uint32_t> ranks;
  for (const auto& [rank, member] : members_) {
    if (member.live && member.joined && member.seen >= since) ranks.push_back(rank);
  }
  return ranks;
}

bool Members::is_gone(uint32_t rank) const noexcept {
  const auto* const member = find(rank);
  return member != nullptr && member->dead && !member->live;
}

const std::vector<uint32_t>& Members::pushers(uint64_t step) const {
  if (pushers_ && pushers_->first == step) return pushers_->second;
  auto& ranks = pushers_.emplace(step, live()).second;
  std::erase_if(ranks, [&](uint32_t rank) { return members_.at(rank).first > step; });
  return ranks;
}

bool Members::may_push(std::optional<uint32_t> rank, uint64_t step, Time now) const {
  const auto may = [&](const Member& member) { return member.live && member.first <= step; };
  if (rank) {
    const auto* const member = find(*rank);
    return member == nullptr ? awaits_unknown(now) : may(*member);
  }
  return awaits_unknown(now) ||
         std::any_of(members_.begin(), members_.end(), [&](const auto& entry) { return may(entry.second); });
}

bool Members::has_senior(uint32_t rank, const std::vector<uint32_t>& ranks, uint64_t step) const {
  const auto* const own = find(rank);
  return own != nullptr && std::any_of(ranks.begin(), ranks.end(), [&](uint32_t other) {
           const auto* const member = find(other);
           return member != nullptr && member->live && member->joined && member->joined_at < own->joined_at &&
                  member->first <= step;
         });
}

Members::Record Members::record() const {
  Record record;
  for (const auto& [rank, member] : members_) {
    if (!member.joined) continue;
    record.ranks.push_back(rank);
    record.incarnations.push_back(member.incarnation);
    record.joined_at.push_back(member.joined_at);
    record.live.push_back(member.live ? 1 : 0);
  }
  return record;
}

void Members::restore(const Record& record, bool awaits_all, Time now) {
  forget_lists();
  const size_t count = record.ranks.size();
  if (record.incarnations.size() != count || record.joined_at.size() != count || record.live.size() != count) {
    throw CheckpointError("a snapshot's list of workers is damaged; use an older snapshot");
  }
  members_.clear();
  unknown_until_ = now + rules_.heartbeat;
  if (awaits_all) configure(rules_, now);
  for (size_t i = 0; i < count; ++i) {
    auto& member = members_[record.ranks[i]];
    member.incarnation = record.incarnations[i];
    member.joined_at = record.joined_at[i];
    member.first = member.joined_at + 1;
    member.live = record.live[i] != 0;
    member.dead = !member.live;
    member.joined = member.is_of_snapshot = true;
    member.give_sign(now);
  }
}

}  // namespace muster::server
