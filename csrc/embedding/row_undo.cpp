#include "embedding/row_undo.h"

#include <algorithm>

namespace muster {

RowUndo::RowUndo(int64_t rows, int block_bits, int64_t dim, int64_t state_width)
    : rows_(rows),
      block_bits_(block_bits),
      dim_(static_cast<size_t>(dim)),
      state_width_(static_cast<size_t>(state_width)),
      saved_(static_cast<size_t>((rows + (int64_t{1} << block_bits) - 1) >> block_bits)) {}

int64_t RowUndo::count() const noexcept { return std::min(int64_t{1} << block_bits_, rows_ - next_); }

void RowUndo::save(int64_t place, const float* values, const float* state) {
  if (place < next_ || place >= rows_) return;
  auto& saved = saved_[static_cast<size_t>(place >> block_bits_)][place];
  if (saved) return;
  saved = std::make_unique_for_overwrite<float[]>(dim_ + state_width_);
  std::copy_n(values, dim_, saved.get());
  std::copy_n(state, state_width_, saved.get() + dim_);
}

void RowUndo::finish_block(std::span<float> values, std::span<float> states) {
  auto& block = saved_[static_cast<size_t>(next_ >> block_bits_)];
  for (const auto& [place, saved] : block) {
    const auto i = static_cast<size_t>(place - next_);
    std::copy_n(saved.get(), dim_, values.data() + i * dim_);
    std::copy_n(saved.get() + dim_, state_width_, states.data() + i * state_width_);
  }
  SavedRows().swap(block);
  next_ += count();
}

}  // namespace muster
