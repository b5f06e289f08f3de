#include "data/shared_pass.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "core/log.h"
#include "muster/batch.h"
#include "muster/error.h"

namespace muster::detail {

SharedPass::SharedPass(std::shared_ptr<Members> members, uint32_t rank, server::PassId pass, NextBatch next_batch,
                       std::vector<int> replicas_of_worker)
    : members_(std::move(members)),
      rank_(rank),
      replicas_of_worker_(std::move(replicas_of_worker)),
      pass_(pass),
      next_batch_(std::move(next_batch)) {}

int SharedPass::replicas_of(uint32_t rank) const {
  return replicas_of_worker_.empty() ? 1 : replicas_of_worker_.at(rank);
}

SharedPass::Part SharedPass::part_of_rank(const SharedPiece& shared, uint32_t rank) const {
  int parts = 0;
  int first = -1;
  for (const uint32_t member : shared.members) {
    if (member == rank) first = parts;
    parts += replicas_of(member);
  }
  const int own = replicas_of(rank);
  if (first < 0) return {shared.begin, shared.end, shared.end, std::vector<int64_t>(static_cast<size_t>(own), 0)};
  const auto sizes = part_sizes(shared.end - shared.begin, parts);
  const auto mine = sizes.begin() + first;
  const int64_t begin = std::accumulate(sizes.begin(), mine, shared.begin);
  return {shared.begin, begin, std::accumulate(mine, mine + own, begin), {mine, mine + own}};
}

std::optional<SharedPiece> SharedPass::take_batch() {
  if (was_left_by_others_) return std::nullopt;
  const auto samples = next_batch_();
  if (!samples) return std::nullopt;
  ++taken_;
  const int64_t begin = std::exchange(position_, position_ + *samples);
  begins_.push_back(begin);
  return SharedPiece{begin, position_};
}

void SharedPass::skip(int64_t batches) {
  while (taken_ < batches && take_batch()) {
  }
}

std::vector<SharedPiece> SharedPass::left() const {
  std::vector<SharedPiece> pieces(again_.begin(), again_.end());
  pieces.insert(pieces.end(), promised_.begin(), promised_.end());
  const std::lock_guard lock(mutex_);
  for (const auto& [number, piece] : asked_) pieces.push_back(piece);
  if (current_) pieces.push_back(*current_);
  return pieces;
}

int64_t SharedPass::num_trained() const {
  int64_t oldest = position_;
  int64_t samples = 0;
  for (const auto& piece : left()) {
    oldest = std::min(oldest, piece.begin);
    samples += piece.end - piece.begin;
  }
  if (oldest == position_) return taken_;
  const auto first = std::upper_bound(begins_.begin(), begins_.end(), oldest) - 1;  // the batch that it is of
  if (const int64_t again = position_ - *first - samples; again > 0) {
    log(LogLevel::warning, "workers that died left samples of epoch " + std::to_string(pass_.epoch) + " undone: " +
                               std::to_string(again) + " behind them come once more where a job goes on from here");
  }
  return taken_ - (begins_.end() - first);
}

void SharedPass::go_on(const PassStanding& others, const std::vector<uint32_t>& members) {
  was_left_by_others_ = others.is_left;
  skip(others.taken);
  for (const auto* pieces : {&others.again, &others.asked, &others.open}) {
    for (const auto& piece : *pieces) {
      if (0 <= piece.begin && piece.begin <= piece.end && piece.end <= position_) continue;
      throw InvalidArgument("the workers that this one joined read samples " + std::to_string(piece.begin) + " to " +
                            std::to_string(piece.end) + " in a pass over a loader that has " +
                            std::to_string(position_) + " here; give all workers the same data");
    }
  }
  again_.assign(others.again.begin(), others.again.end());
  promised_.assign(others.asked.begin(), others.asked.end());
  open_ = others.open;
  return_parts_of_lost(members);
}

PassStanding SharedPass::standing() const {
  PassStanding standing{pass_.loader, pass_.epoch, was_left_by_others_ || (!ended_ && is_left()), taken_, {},
                        {},           open_};
  if (standing.is_left) return {pass_.loader, pass_.epoch, true, taken_, {}, {}, {}};
  standing.again.assign(again_.begin(), again_.end());
  const std::lock_guard lock(mutex_);
  for (const auto& [number, piece] : asked_) standing.asked.push_back(piece);
  standing.asked.insert(standing.asked.end(), promised_.begin(), promised_.end());
  return standing;
}

std::optional<int64_t> SharedPass::next() {
  SharedPiece piece;
  if (!promised_.empty()) {
    piece = std::move(promised_.front());
    promised_.pop_front();
  } else if (!again_.empty()) {
    piece = again_.front();
    again_.pop_front();
    piece.members = members_->expected();
  } else if (auto batch = take_batch()) {
    piece = std::move(*batch);
    piece.members = members_->expected();
  } else {
    return std::nullopt;
  }
  const std::lock_guard lock(mutex_);
  asked_.emplace(++last_, std::move(piece));
  return last_;
}

SharedPass::Part SharedPass::part_of(int64_t number) const {
  const std::lock_guard lock(mutex_);
  return part_of_rank(asked_.at(number), rank_);
}

int64_t SharedPass::oldest_position() const {
  int64_t oldest = position_;
  const auto see = [&oldest](const auto& pieces) {
    for (const auto& piece : pieces) oldest = std::min(oldest, piece.begin);
  };
  see(left());
  see(open_);
  return oldest;
}

void SharedPass::yielded(int64_t number) {
  const std::lock_guard lock(mutex_);
  current_ = std::move(asked_.extract(number).mapped());
}

void SharedPass::lost(int64_t number) {
  const std::lock_guard lock(mutex_);
  asked_.erase(number);
}

std::optional<server::BatchId> SharedPass::begin_step() {
  if (current_) open_.push_back(std::move(*current_));
  current_.reset();
  return std::nullopt;
}

void SharedPass::end_step(WindowEnd window, const std::vector<uint32_t>& members) {
  if (window == WindowEnd::closed) return_parts_of_lost(members);
  if (window == WindowEnd::dropped) open_.clear();
}

void SharedPass::return_parts_of_lost(const std::vector<uint32_t>& members) {
  for (const auto& shared : open_) {
    for (const uint32_t rank : shared.members) {
      if (std::binary_search(members.begin(), members.end(), rank)) continue;
      const auto part = part_of_rank(shared, rank);
      if (part.begin < part.end) again_.push_back({part.begin, part.end});
    }
  }
  open_.clear();
  const int64_t oldest = oldest_position();
  while (begins_.size() > 1 && begins_[1] <= oldest) begins_.pop_front();
}

}  // namespace muster::detail
