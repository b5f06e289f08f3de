#include <algorithm>
#include <string>
#include <utility>

#include "core/flat_layout.h"
#include "muster/error.h"
#include "optimizer/optimizer_state.h"

namespace muster {

namespace {

bool is_resized(const StateEntry& entry) { return entry.is_resized(); }

// Whether there is what a parameter of another size would have to take along. Equal on all ranks.
bool has_values(const StateEntry& entry) { return entry.num_states > 0 || (entry.started && has_master(entry.dtype)); }

}  // namespace

void OptimizerState::follow(size_t parameter) {
  auto& entry = entries_.at(parameter);
  if (shard_.size > 1 && entry.is_resized()) follow_sizes();
  if (follow(entry) && entry.started) note_started(parameter);
  const auto& step = entry.step;
  const bool is_in_place =
      counts_.defined() ? step.const_data_ptr() == counts_.const_data_ptr<float>() + parameter : step.is_cpu();
  if (!is_in_place || step.scalar_type() != at::kFloat || step.numel() != 1)
    refuse(entry, "step", step, "Float of shape []");
}

bool OptimizerState::follow(StateEntry& entry) {
  const auto& tensor = entry.parameter.tensor;
  const bool has_other_size = entry.is_resized();
  if (!has_other_size && entry.dtype == tensor.scalar_type() && entry.strides == tensor.strides()) return false;
  if (entry.parameter.is_row_wise && entry.num_states > 0) {
    throw InvalidArgument("parameter '" + entry.parameter.name +
                          "' was moved, resized or converted after a row-wise step; do that before prepare()");
  }
  const bool is_dense_now = is_dense(tensor.sizes().vec(), tensor.strides().vec());
  if (shard_.size > 1 && (!is_dense_now || entry.num_states > 0)) {
    throw InvalidArgument("parameter '" + entry.parameter.name +
                          "' has gaps in its memory, or another layout or dtype than when it was first stepped; with "
                          "shard_optimizer=True convert the module before prepare()");
  }
  const bool keeps_master =
      has_other_size && has_values(entry) && entry.master.defined() && has_master(tensor.scalar_type());
  for (size_t which = 0; which <= StateEntry::kMaster; ++which) {
    const auto& held = entry.tensor(which);
    if (which == StateEntry::kMaster && !keeps_master) continue;
    if (held.defined() && held.sizes() != tensor.sizes()) refuse(entry, which);
  }
  take_shape(entry);
  const auto lay_anew = [&](at::Tensor& held) {
    const auto old = std::exchange(held, empty_state(entry));
    held.copy_(old);
  };
  for (auto& state : entry.states) {
    if (state.defined()) lay_anew(state);
  }
  if (keeps_master) {
    lay_anew(entry.master);
  } else {
    entry.master = new_master(entry);
  }
  return true;
}

void OptimizerState::take_shape(StateEntry& entry) const {
  const auto& tensor = entry.parameter.tensor;
  entry.dtype = tensor.scalar_type();
  entry.sizes = tensor.sizes().vec();
  entry.strides = tensor.strides().vec();
  entry.is_dense = is_dense(entry.sizes, entry.strides);
  if (shard_.size == 1) entry.run = {0, tensor.numel()};
  std::fill(std::begin(entry.common), std::end(entry.common), nullptr);
}

// As follow, but state that is to be replaced next may have the size that the parameter had.
void OptimizerState::follow_before_set(StateEntry& entry) {
  if (!entry.is_resized() || entry.parameter.is_row_wise) {
    follow(entry);
  } else if (shard_.size > 1) {
    follow_sizes();
  } else {
    const bool keeps_master = has_values(entry) && has_master(entry.parameter.tensor.scalar_type());
    take_shape(entry);
    if (!keeps_master || !entry.master.defined()) entry.master = new_master(entry);
  }
}

// Runs are of the sizes that parameters have from here on; of shards, what there is of the state, too.
void OptimizerState::follow_sizes() {
  if (std::ranges::none_of(entries_, is_resized)) return;
  if (shard_.size > 1) check_shard_sizes();
  std::vector<int64_t> numels;
  for (const auto& entry : entries_) numels.push_back(entry.parameter.tensor.numel());
  const auto runs = runs_of(numels, shard_);
  for (size_t p = 0; p < entries_.size(); ++p) entries_[p].run = runs[p];
  if (shard_.size == 1) return;
  for (auto& entry : entries_) {
    follow(entry);
    entry.master = new_master(entry);
    entry.common[StateEntry::kMaster] = nullptr;
  }
}

// Another size of one parameter moves the runs of all.
void OptimizerState::check_shard_sizes() const {
  const auto resized = std::ranges::find_if(entries_, is_resized);
  if (resized == entries_.end() || std::ranges::none_of(entries_, has_values)) return;
  throw InvalidArgument("parameter '" + resized->parameter.name + "' has shape " +
                        c10::str(resized->parameter.tensor.sizes()) + ", and had " +
                        c10::str(at::IntArrayRef(resized->sizes)) +
                        " when the workers divided the optimizer's state; drop all of it (optimizer.state.clear()), "
                        "or build and prepare() a new optimizer");
}

void OptimizerState::check_tensors(size_t parameter) const {
  const auto& entry = entries_[parameter];
  for (size_t which = 0; which < entry.num_states; ++which) check_tensor(entry, which);
  check_tensor(entry, StateEntry::kMaster);
}

// User code may have changed it through its .data.
void OptimizerState::check_tensor(const StateEntry& entry, size_t which) const {
  const auto& tensor = entry.tensor(which);
  if (tensor.defined() && !fits(entry, tensor)) refuse(entry, which);
}

// Whether it is as empty_state.
bool OptimizerState::fits(const StateEntry& entry, const at::Tensor& tensor) const {
  if (tensor.scalar_type() != accumulation_dtype(entry.dtype) || tensor.device() != device_) return false;
  if (shard_.size > 1) return tensor.numel() == entry.run.count && tensor.is_contiguous();
  if (entry.parameter.is_row_wise) return tensor.numel() == entry.sizes[0] && tensor.is_contiguous();
  if (tensor.sizes() != at::IntArrayRef(entry.sizes)) return false;
  return entry.is_dense ? tensor.strides() == at::IntArrayRef(entry.strides) : tensor.is_contiguous();
}

void OptimizerState::refuse(const StateEntry& entry, size_t which) const {
  const auto& tensor = entry.parameter.tensor;
  auto expected = std::string(c10::toString(accumulation_dtype(tensor.scalar_type()))) + " of shape ";
  if (shard_.size > 1) {
    expected += c10::str(at::IntArrayRef(entry.run.count));
  } else if (entry.parameter.is_row_wise) {
    expected += c10::str(at::IntArrayRef({tensor.size(0), 1}));
  } else {
    expected += c10::str(tensor.sizes()) + " in the parameter's memory order";
  }
  refuse(entry, which == StateEntry::kMaster ? "master" : names()[which], entry.tensor(which), expected);
}

void OptimizerState::refuse(const StateEntry& entry, const char* name, const at::Tensor& held,
                            const std::string& expected) const {
  throw InvalidArgument(
      "parameter '" + entry.parameter.name + "' has shape " + c10::str(entry.parameter.tensor.sizes()) + ", and its '" +
      name + "' in the optimizer's state is " + c10::toString(held.scalar_type()) + " of shape " +
      c10::str(held.sizes()) + " on " + held.device().str() + ", where a step takes " + expected + " on " +
      device_.str() +
      "; put such a tensor into optimizer.state (not into the .data of the one that is there), drop what there is of "
      "the parameter (optimizer.state.pop(parameter), in C++ state().erase()), or build and prepare() a new optimizer");
}

}  // namespace muster
