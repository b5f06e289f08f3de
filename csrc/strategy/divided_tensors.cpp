#include "strategy/divided_tensors.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "core/flat_layout.h"

namespace muster {

std::optional<checkpoint::Run> own_run(const OptimizerState& state, size_t parameter, size_t which) {
  const auto& entry = state.entry(parameter);
  const auto& whole = entry.parameter.tensor;
  const bool is_there = which == StateEntry::kMaster ? has_master(entry.dtype) : which < entry.num_states;
  if (!is_there || state.shard().size == 1 || whole.numel() == 0 || !whole.is_contiguous()) return std::nullopt;
  auto elements = entry.current(which);
  if (!elements.defined()) {
    elements = at::empty({0}, at::TensorOptions(accumulation_dtype(entry.dtype)).device(state.device()));
  }
  return checkpoint::Run{"", whole.sizes().vec(), entry.run.begin, std::move(elements)};
}

at::Tensor DividedTensors::stand_in(checkpoint::Run run) {
  auto tensor = at::empty(run.shape, run.elements.options().device(at::kMeta));
  runs_.emplace(tensor.storage().unsafeGetStorageImpl(), std::move(run));
  stand_ins_.push_back(tensor);
  return tensor;
}

const checkpoint::Run* DividedTensors::find(const at::Tensor& tensor) const {
  const auto found = runs_.find(tensor.storage().unsafeGetStorageImpl());
  return found == runs_.end() ? nullptr : &found->second;
}

checkpoint::JointContent joint_content(const checkpoint::NamedTensors& tensors, const DividedTensors& divided,
                                       const std::set<std::string>& alike) {
  checkpoint::JointContent content;
  for (const auto& [name, tensor] : tensors) {
    if (const auto* const own = divided.find(tensor)) {
      content.divided.push_back(*own);
      content.divided.back().name = name;
    } else {
      (alike.contains(name) ? content.alike : content.chiefs).emplace(name, tensor);
    }
  }
  return content;
}

}  // namespace muster
