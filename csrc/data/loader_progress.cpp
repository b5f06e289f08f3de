#include "data/loader_progress.h"

#include <algorithm>
#include <atomic>

namespace muster::detail {

// With the batch of the latest call, where that is another one.
BatchCalls::Usual BatchCalls::usual_for(int64_t batch) const {
  auto usual = usual_;
  if (batch != batch_ && batch_ != 0) (is_last_ ? usual.calls_of_last : usual.calls) = calls_;
  return usual;
}

bool BatchCalls::ends(int64_t batch, bool is_last) const {
  return (batch == batch_ ? calls_ : 0) + 1 >= usual_for(batch).expected(is_last);
}

bool BatchCalls::fell_short(int64_t batch) const {
  return batch != batch_ && is_last_ && calls_ < usual_.expected(/*of_last=*/true);
}

void BatchCalls::note(int64_t batch, bool is_last) {
  usual_ = usual_for(batch);
  if (batch != batch_) {
    batch_ = batch;
    calls_ = 0;
    is_last_ = false;
  }
  ++calls_;
  is_last_ = is_last_ || is_last;
}

int64_t LoaderProgress::begin_pass() noexcept {
  at_end = false;
  last_batch = 0;
  before = yielded;
  return ++passes;
}

int64_t LoaderProgress::note_yield(bool is_last) noexcept {
  static std::atomic<int64_t> clock_of_all{0};
  clock_before = clock;
  clock = ++clock_of_all;
  ++yielded;
  at_end = false;
  if (is_last) note_end();
  return yielded;
}

void LoaderProgress::note_end() noexcept {
  at_end = true;
  last_batch = yielded;
}

void LoaderProgress::note_passed_end() noexcept {
  if (yielded > before) last_batch = yielded;
}

bool LoaderProgress::may_stand_at_end(const std::vector<std::weak_ptr<LoaderProgress>>& loaders) const {
  if (!at_end || left == passes) return false;
  return std::none_of(loaders.begin(), loaders.end(), [this](const auto& loader) {
    const auto other = loader.lock();
    return other && other->clock_before > clock && (other->in_step || !other->in_run);
  });
}

}  // namespace muster::detail
