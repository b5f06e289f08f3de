// A flat optimizer's state in memory that several processes see.
#include <ATen/ops/from_blob.h>

#include "core/flat_layout.h"
#include "optimizer/flat_optimizer.h"

namespace muster {

// State of the stepped parameters that other processes do not see goes to memory that they do, each element's value
// from its owner; what there is none of starts from the zeros there.
void FlatOptimizer::move_to_common(const DividedStep& divided) {
  constexpr int64_t kAlignment = FlatLayout::kSlotAlignment;
  struct Move {
    size_t parameter;
    size_t which;
    int64_t offset;
  };
  std::vector<Move> moves;
  int64_t bytes = 0;
  const auto& gradients = divided.shares.front().gradients;
  for (size_t p = 0; p < entries_.size(); ++p) {
    if (!gradients[p].dense.defined() && !gradients[p].sparse.defined()) continue;
    auto& entry = entries_[p];
    const auto size = static_cast<int64_t>(c10::elementSize(accumulation_dtype(entry.dtype)));
    for (size_t which = 0; which <= kMaster; ++which) {
      const bool exists = which == kMaster ? entry.master.defined() : which < entry.num_states;
      const auto& parameter = entry.parameter;
      if (!exists || is_common(entry, which) || parameter.is_row_wise || parameter.tensor.numel() == 0) continue;
      moves.push_back({p, which, bytes});
      bytes += (entry.parameter.tensor.numel() * size + kAlignment - 1) / kAlignment * kAlignment;
    }
  }
  if (moves.empty()) return;
  const auto memory = divided.allocate_common(bytes);
  for (const auto& [p, which, offset] : moves) {
    auto& entry = entries_[p];
    const auto& tensor = entry.parameter.tensor;
    // A storage of its own, so that whoever saves or copies one does not take all.
    auto common = at::from_blob(
        memory.mutable_data_ptr<uint8_t>() + offset, tensor.sizes(), tensor.strides(), [memory](void*) {},
        device_options(accumulation_dtype(entry.dtype)));
    auto& own = tensor_of(entry, which);
    if (own.defined()) {
      for (const auto& share : divided.shares) {
        elements_of(common, share.runs[p]).copy_(elements_of(own, share.runs[p]));
      }
    }
    own = std::move(common);
    entry.common[which] = own.const_data_ptr();
    if (divided.note_common) divided.note_common(own);
    note_started(p);
  }
}

bool FlatOptimizer::is_common(const Entry& entry, size_t which) const {
  return entry.common[which] != nullptr && entry.common[which] == tensor_of(entry, which).const_data_ptr();
}

FlatOptimizer::Standing FlatOptimizer::standing(size_t p) const {
  const auto& entry = entries_[p];
  Standing standing;
  if (!is_streamed()) standing.steps = *static_cast<const float*>(entry.step.const_data_ptr());
  if (!entry.started || entry.parameter.is_row_wise || entry.parameter.tensor.numel() == 0) return standing;
  for (size_t which = 0; which <= kMaster && !standing.has_own_state; ++which) {
    standing.has_own_state = tensor_of(entry, which).defined() && !is_common(entry, which);
  }
  return standing;
}

// Before a step or values of this process alone.
void FlatOptimizer::leave_common(size_t p) {
  auto& entry = entries_[p];
  for (size_t which = 0; which <= kMaster; ++which) {
    if (!is_common(entry, which)) continue;
    entry.common[which] = nullptr;
    auto& tensor = tensor_of(entry, which);
    tensor = empty_state(entry).copy_(tensor);
    note_started(p);
  }
}

}  // namespace muster
