#include "window/skip_limit.h"

#include "muster/error.h"

namespace muster {

void SkipLimit::note(const WindowSums& sums, int64_t step) {
  if (sums.on_device) {
    watch_.note(sums.report, step, sums.non_finite_at);
    watch_.look();
    in_a_row_ = watch_.in_a_row();
    last_step_ = watch_.step();
    where_ = watch_.non_finite_at();
    searches_ = max_skipped_ <= 1 || 2 * in_a_row_ >= max_skipped_;
  } else {
    in_a_row_ = sums.finite ? 0 : in_a_row_ + 1;
    last_step_ = step;
    where_ = sums.non_finite_at;
    searches_ = !sums.finite || max_skipped_ <= 1;
  }
}

void SkipLimit::check() const {
  if (in_a_row_ < max_skipped_ || in_a_row_ == 0) return;
  throw NonFinite("the gradient was not finite in " + std::to_string(in_a_row_) +
                  " windows in a row, the last at step " + std::to_string(last_step_) +
                  (where_.empty() ? std::string() : ", first in " + where_) +
                  "; lower the learning rate, clip the norm, or check the data; max_skipped raises the limit");
}

}  // namespace muster
