#include "strategy/sharing.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "muster/error.h"

namespace muster::detail {

Sharing::Sharing(std::shared_ptr<StrategyCore> core, int loader, int64_t epoch, std::vector<size_t> order,
                 int64_t batch_size, int64_t batches)
    : core_(std::move(core)),
      loader_(static_cast<uint32_t>(loader)),
      epoch_(static_cast<uint64_t>(epoch)),
      order_(std::move(order)),
      batch_size_(batch_size),
      batches_(batches) {}

void Sharing::go_on(const PassStanding& others, const std::vector<uint32_t>& members) {
  const auto samples = static_cast<int64_t>(order_.size());
  for (const auto* pieces : {&others.again, &others.asked, &others.open}) {
    for (const auto& piece : *pieces) {
      if (0 <= piece.begin && piece.begin <= piece.end && piece.end <= samples) continue;
      throw InvalidArgument("the workers that this one joined read samples " + std::to_string(piece.begin) + " to " +
                            std::to_string(piece.end) + " in a pass over a loader that has " + std::to_string(samples) +
                            " here; give all workers the same data");
    }
  }
  taken_ = others.is_left ? batches_ : std::min(others.taken, batches_);
  again_.assign(others.again.begin(), others.again.end());
  promised_.assign(others.asked.begin(), others.asked.end());
  open_ = others.open;
  settle(members);
}

PassStanding Sharing::standing() const {
  PassStanding standing{loader_, epoch_, !ended_ && is_left(), taken_, {}, {}, open_};
  if (standing.is_left) return {loader_, epoch_, true, batches_, {}, {}, {}};
  standing.again.assign(again_.begin(), again_.end());
  const std::lock_guard lock(mutex_);
  for (const auto& [number, piece] : asked_) standing.asked.push_back(piece);
  standing.asked.insert(standing.asked.end(), promised_.begin(), promised_.end());
  return standing;
}

std::vector<uint32_t> Sharing::expected() const {
  const auto pass = core_->enter();
  if (core_->has_servers()) return core_->servers().expected();
  std::vector<uint32_t> all(static_cast<size_t>(core_->topology().num_workers));
  std::iota(all.begin(), all.end(), 0U);
  return all;
}

std::optional<int64_t> Sharing::next() {
  SharedPiece piece;
  if (!promised_.empty()) {
    piece = std::move(promised_.front());
    promised_.pop_front();
  } else if (!again_.empty()) {
    piece = again_.front();
    again_.pop_front();
    piece.members = expected();
  } else if (taken_ < batches_) {
    const int64_t begin = taken_++ * batch_size_;
    piece = {begin, std::min(begin + batch_size_, static_cast<int64_t>(order_.size())), expected()};
  } else {
    return std::nullopt;
  }
  const std::lock_guard lock(mutex_);
  asked_.emplace(++last_, std::move(piece));
  return last_;
}

// Nothing for one that is no member.
SharedPiece Sharing::part_of(const SharedPiece& shared, uint32_t rank) {
  const auto found = std::lower_bound(shared.members.begin(), shared.members.end(), rank);
  if (found == shared.members.end() || *found != rank) return {shared.end, shared.end};
  const auto sizes = part_sizes(shared.end - shared.begin, static_cast<int>(shared.members.size()));
  const auto own = sizes.begin() + (found - shared.members.begin());
  const int64_t begin = std::accumulate(sizes.begin(), own, shared.begin);
  return {begin, begin + *own};
}

ReadTask Sharing::task_of(int64_t number) const {
  const std::lock_guard lock(mutex_);
  const auto& shared = asked_.at(number);
  const auto own = part_of(shared, static_cast<uint32_t>(core_->topology().rank));
  ReadTask task;
  task.parts.emplace_back(order_.begin() + own.begin, order_.begin() + own.end);
  if (own.begin == own.end) task.model = order_[static_cast<size_t>(shared.begin)];
  return task;
}

void Sharing::yielded(int64_t number) {
  const std::lock_guard lock(mutex_);
  current_ = std::move(asked_.extract(number).mapped());
}

void Sharing::lost(int64_t number) {
  const std::lock_guard lock(mutex_);
  asked_.erase(number);
}

void Sharing::stepped() {
  if (!current_) return;
  open_.push_back(std::move(*current_));
  current_.reset();
}

void Sharing::settle(const std::vector<uint32_t>& members) {
  for (const auto& shared : open_) {
    for (const uint32_t rank : shared.members) {
      if (std::binary_search(members.begin(), members.end(), rank)) continue;
      const auto part = part_of(shared, rank);
      if (part.begin < part.end) again_.push_back(part);
    }
  }
  open_.clear();
}

}  // namespace muster::detail
