#include "embedding/row_cut.h"

#include <algorithm>

namespace muster {

void RowCut::save(int64_t row, int64_t place, const float* values, const float* state) {
  if (!has(place) || row < next_) return;
  auto& page = pages_[static_cast<size_t>(place / kPage)];
  if (!page) page = std::make_unique<std::array<Saved, kPage>>();
  auto& saved = (*page)[static_cast<size_t>(place % kPage)];
  if (saved) return;
  saved = std::make_unique_for_overwrite<float[]>(dim_ + state_width_);
  std::copy_n(values, dim_, saved.get());
  std::copy_n(state, state_width_, saved.get() + dim_);
}

void RowCut::finish(int64_t row, int64_t place, std::span<float> values, std::span<float> state) {
  next_ = row + 1;
  const auto& page = pages_[static_cast<size_t>(place / kPage)];
  if (!page) return;
  auto& saved = (*page)[static_cast<size_t>(place % kPage)];
  if (!saved) return;
  std::copy_n(saved.get(), dim_, values.data());
  std::copy_n(saved.get() + dim_, state_width_, state.data());
  saved = nullptr;
}

}  // namespace muster
