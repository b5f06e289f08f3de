#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <utility>

#include "core/flat_layout.h"
#include "optimizer/optimizer_state.h"

namespace muster {

std::vector<OptimizerState::Move> OptimizerState::moves_to_common(const std::vector<size_t>& parameters,
                                                                  const std::vector<size_t>& num_states,
                                                                  int64_t& bytes) const {
  constexpr int64_t kAlignment = FlatLayout::kSlotAlignment;
  std::vector<Move> moves;
  bytes = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& entry = entries_[parameters[i]];
    if (entry.parameter.is_row_wise || entry.run.count == 0) continue;
    const auto size = static_cast<int64_t>(c10::elementSize(accumulation_dtype(entry.dtype)));
    for (size_t which = 0; which <= StateEntry::kMaster; ++which) {
      const bool exists =
          which == StateEntry::kMaster ? entry.master.defined() : which < std::max(entry.num_states, num_states[i]);
      if (!exists || entry.is_common(which)) continue;
      moves.push_back({parameters[i], which, bytes});
      bytes += (entry.run.count * size + kAlignment - 1) / kAlignment * kAlignment;
    }
  }
  return moves;
}

std::vector<CommonPart> OptimizerState::common_parts(const std::vector<size_t>& parameters,
                                                     const std::vector<size_t>& num_states,
                                                     const std::vector<std::vector<Run>>& runs) const {
  int64_t bytes = 0;
  const auto moves = moves_to_common(parameters, num_states, bytes);
  std::vector<CommonPart> parts;
  int64_t begin = 0;  // of the last part
  for (const auto& [p, which, offset] : moves) {
    const auto size = static_cast<int64_t>(c10::elementSize(accumulation_dtype(entries_[p].dtype)));
    for (size_t share = 0; share < runs.size(); ++share) {
      const auto& run = runs[share][p];
      if (run.count == 0 || (!parts.empty() && parts.back().share == share)) continue;
      const int64_t end = offset + (run.begin - entries_[p].run.begin) * size;
      if (!parts.empty()) parts.back().bytes = end - begin;
      parts.push_back({share, 0});
      begin = end;
    }
  }
  if (!parts.empty()) parts.back().bytes = bytes - begin;
  return parts;
}

std::vector<at::Tensor> OptimizerState::move_to_common(const std::vector<size_t>& parameters,
                                                       const std::vector<size_t>& num_states, const at::Tensor& memory,
                                                       const std::vector<std::vector<Run>>& runs) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> moved;
  int64_t bytes = 0;
  for (const auto& [p, which, offset] : moves_to_common(parameters, num_states, bytes)) {
    auto& entry = entries_[p];
    check_tensor(entry, which);
    const auto& tensor = entry.parameter.tensor;
    const bool is_run = shard_.size > 1;
    // A storage of its own, so that whoever saves or copies one does not take all. On the state's device to torch,
    // though another one may have the memory.
    auto common = at::from_blob(
        memory.mutable_data_ptr<uint8_t>() + offset, is_run ? at::IntArrayRef(entry.run.count) : tensor.sizes(),
        is_run ? at::IntArrayRef(1) : tensor.strides(), [memory](void*) {},
        device_options(accumulation_dtype(entry.dtype)), device_);
    auto& own = entry.tensor(which);
    for (size_t share = 0; share < runs.size() && own.defined(); ++share) {
      const auto& of_share = runs[share][p];
      if (of_share.count == 0) continue;
      const Run in_state{of_share.begin - entry.run.begin, of_share.count};
      elements_of(common, in_state).copy_(elements_of(own, in_state));
    }
    if (!own.defined() && which != StateEntry::kMaster) note_new_state(entry, which);
    own = std::move(common);
    entry.common[which] = own.const_data_ptr();
    if (which != StateEntry::kMaster) entry.num_states = std::max(entry.num_states, which + 1);
    moved.push_back(own);
    note_started(p);
  }
  return moved;
}

void OptimizerState::leave_common(size_t p) {
  auto& entry = entries_[p];
  for (size_t which = 0; which <= StateEntry::kMaster; ++which) {
    if (!entry.is_common(which)) continue;
    entry.common[which] = nullptr;
    auto& tensor = entry.tensor(which);
    tensor = empty_state(entry).copy_(tensor);
    note_started(p);
  }
}

}  // namespace muster
