#include "server/shard/cut_schedule.h"

#include <utility>

namespace muster::server {

void CutSchedule::configure(std::chrono::milliseconds every, Time now) {
  every_ = every;
  begun_ = ended_ = now;
}

void CutSchedule::begin_at(uint64_t step) {
  const uint64_t before = complete_ < step ? complete_ : before_;
  before_ = before < step ? before : 0;
  last_ = complete_ = step;
}

void CutSchedule::note_complete(uint64_t step, Time now) {
  if (step <= complete_) return;
  before_ = std::exchange(complete_, step);
  if (step < last_) return;
  ended_ = now;
  took_ = ended_ - begun_;
  is_urgent_ = false;
}

Cut CutSchedule::decide(uint64_t step, Time now) {
  const bool is_time = now - begun_ >= every_ || (is_wanted_ && now - ended_ >= took_);
  if (last_ > complete_ || !(is_time || is_urgent_ || is_demanded_)) return {false, before_};
  last_ = step;
  begun_ = now;
  is_wanted_ = is_urgent_ = is_demanded_ = false;
  return {true, before_};
}

}  // namespace muster::server
