#include "embedding/row_cut.h"

#include <algorithm>

namespace muster {

void RowCut::save(int64_t row, int64_t place, const float* values, const float* state) {
  if (place >= rows_ || row < next_) return;
  auto& saved = saved_[row];
  if (saved) return;
  saved = std::make_unique_for_overwrite<float[]>(dim_ + state_width_);
  std::copy_n(values, dim_, saved.get());
  std::copy_n(state, state_width_, saved.get() + dim_);
}

void RowCut::finish(int64_t row, std::span<float> values, std::span<float> state) {
  next_ = row + 1;
  const auto found = saved_.find(row);
  if (found == saved_.end()) return;
  std::copy_n(found->second.get(), dim_, values.data());
  std::copy_n(found->second.get() + dim_, state_width_, state.data());
  saved_.erase(found);
}

}  // namespace muster
