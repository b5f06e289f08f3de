#include "data/loader_progress.h"

#include <algorithm>
#include <atomic>

namespace muster::detail {

BatchCalls::Noted BatchCalls::note(int64_t batch, bool is_last) {
  Noted noted;
  if (batch != batch_) {
    noted.fell_short = is_last_ && !is_through_;
    if (batch_ != 0) (is_last_ ? usual_last_ : usual_) = calls_;
    batch_ = batch;
    calls_ = 0;
  }
  ++calls_;
  is_last_ = is_last;
  is_through_ = calls_ >= (is_last && usual_last_ > 0 ? usual_last_ : usual_);
  noted.is_through = is_through_;
  return noted;
}

int64_t LoaderProgress::begin_pass() noexcept {
  at_end = false;
  last_batch = 0;
  return ++passes;
}

int64_t LoaderProgress::note_yield(bool is_last) noexcept {
  static std::atomic<int64_t> clock_of_all{0};
  clock_before = clock;
  clock = ++clock_of_all;
  ++yielded;
  at_end = is_last;
  if (is_last) last_batch = yielded;
  return yielded;
}

bool LoaderProgress::may_stand_at_end(const std::vector<std::weak_ptr<LoaderProgress>>& loaders) const {
  if (!at_end || left == passes) return false;
  return std::none_of(loaders.begin(), loaders.end(), [this](const auto& loader) {
    const auto other = loader.lock();
    return other && other->clock_before > clock;
  });
}

}  // namespace muster::detail
