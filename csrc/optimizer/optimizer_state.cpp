#include "optimizer/optimizer_state.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>

#include "core/flat_layout.h"
#include "core/pages.h"
#include "device/device.h"
#include "device/host_copy.h"
#include "muster/error.h"

namespace muster {

namespace {

constexpr size_t kSgd = 1;
static_assert(std::is_same_v<std::variant_alternative_t<kSgd, FlatGroups>, std::vector<kernels::SgdGroup>>);

// A storage of its own, so that whoever saves or copies one does not take all.
at::Tensor count_in(const at::Tensor& counts, size_t parameter) {
  return at::from_blob(counts.mutable_data_ptr<float>() + parameter, {}, [counts](void*) {}, counts.options());
}

}  // namespace

bool has_master(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

at::Tensor StateEntry::current(size_t which) const {
  if (which != kMaster || !master.defined()) return tensor(which);
  const auto& whole = parameter.tensor;
  if (whole.sizes() != at::IntArrayRef(sizes)) return started ? master : whole.detach().to(master.scalar_type());
  return current_master(master, master.sizes() == whole.sizes() ? whole : elements_of(whole, run));
}

at::Tensor current_master(const at::Tensor& master, const at::Tensor& parameter) {
  const at::NoGradGuard no_grad;
  const auto values = parameter.detach();
  if (master.sizes() != values.sizes()) return master;
  if (!has_master(values.scalar_type())) return values.to(master.scalar_type());
  // By their bits, as the steps (step_math.h): a parameter that is -0 is not +0.
  const auto is_current = master.to(values.scalar_type()).view(at::kShort) == values.view(at::kShort);
  if (is_current.all().item<bool>()) return master;
  return at::where(is_current, master, values.to(master.scalar_type()));
}

OptimizerState::OptimizerState(std::vector<FlatParameter> parameters, const FlatGroups& groups, const Shard& shard)
    : algorithm_(groups.index()),
      shard_(shard),
      device_(parameters.empty() ? c10::Device(c10::kCPU) : parameters.front().tensor.device()) {
  const bool is_served = device_.is_cpu() || device_.is_cuda();
  if (is_streamed(device_)) counts_ = at::zeros({static_cast<int64_t>(parameters.size())}, device_options(at::kFloat));
  std::vector<int64_t> numels;
  for (auto& parameter : parameters) {
    const auto& tensor = parameter.tensor;
    const auto dtype = tensor.scalar_type();
    if (!is_served || tensor.device() != device_ ||
        !(dtype == at::kFloat || dtype == at::kDouble || has_master(dtype))) {
      throw InvalidArgument(
          "parameter '" + parameter.name + "' (" + c10::toString(dtype) + " on " + tensor.device().str() +
          ", the first one on " + device_.str() +
          ") cannot be stepped by a flat optimizer; leave it out of the optimizer, or take one that is "
          "not flat: fuse=False in Python, torch::optim's in C++");
    }
    if (parameter.is_row_wise) check_row_wise(parameter, groups);
    numels.push_back(tensor.numel());
    StateEntry entry;
    entry.parameter = std::move(parameter);
    entry.step = counts_.defined() ? count_in(counts_, entries_.size()) : at::zeros({}, at::kFloat);
    entries_.push_back(std::move(entry));
  }
  const auto runs = runs_of(numels, shard_);
  for (size_t p = 0; p < entries_.size(); ++p) {
    auto& entry = entries_[p];
    entry.run = runs[p];
    follow(entry);
  }
}

void OptimizerState::check_row_wise(const FlatParameter& parameter, const FlatGroups& groups) const {
  const auto& tensor = parameter.tensor;
  const auto refuse = [&](const std::string& why) {
    throw InvalidArgument("row-wise Adagrad of parameter '" + parameter.name + "': " + why);
  };
  // A matrix whose rows are on servers is a stub, of stride 0 (embedding/row_source.h).
  if (!tensor.is_cpu() || tensor.scalar_type() != at::kFloat || tensor.dim() != 2 ||
      !(tensor.is_contiguous() || tensor.stride(0) == 0)) {
    refuse("it must be a contiguous float32 matrix on the CPU, not " + c10::str(tensor.sizes()) + " of " +
           c10::toString(tensor.scalar_type()) + " on " + tensor.device().str());
  }
  if (shard_.size > 1) refuse("its rows are not sharded; leave shard_optimizer out");
  rowwise_group_of(groups, parameter.group);
}

at::TensorOptions OptimizerState::device_options(at::ScalarType dtype) const {
  return at::TensorOptions(dtype).device(device_);
}

at::Tensor OptimizerState::empty_state(const StateEntry& entry) const {
  const auto& tensor = entry.parameter.tensor;
  const auto options = device_options(accumulation_dtype(tensor.scalar_type()));
  if (entry.parameter.is_row_wise) return at::empty({tensor.size(0), 1}, options);
  if (shard_.size > 1) return entry.run.count > 0 ? at::empty({entry.run.count}, options) : at::Tensor();
  if (!entry.is_dense) return at::empty(tensor.sizes(), options);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

at::Tensor OptimizerState::zero_state(const StateEntry& entry) const {
  auto state = empty_state(entry);
  if (!state.defined()) return state;
  if (state.is_cpu()) prefer_huge_pages(state.mutable_data_ptr(), state.nbytes());
  return state.zero_();
}

at::Tensor OptimizerState::new_master(const StateEntry& entry) const {
  return has_master(entry.dtype) ? zero_state(entry) : at::Tensor();
}

// This shard's part of a tensor of the parameter's sizes, shaped as empty_state.
at::Tensor OptimizerState::own_part(const StateEntry& entry, const at::Tensor& whole) const {
  if (shard_.size == 1) return whole;
  const auto& tensor = entry.parameter.tensor;
  const auto ordered = at::empty_strided(tensor.sizes(), tensor.strides(), whole.options()).copy_(whole);
  return elements_of(ordered, entry.run);
}

void OptimizerState::allocate(StateEntry& entry, size_t num_states) {
  for (size_t s = entry.num_states; s < num_states; ++s) {
    entry.states[s] = zero_state(entry);
    note_new_state(entry, s);
  }
  entry.num_states = std::max(entry.num_states, num_states);
}

// SGD begins a momentum buffer with the gradient, whenever that comes: its count is of steps with the buffer.
void OptimizerState::note_new_state(StateEntry& entry, size_t which) {
  if (algorithm_ == kSgd && which == 0 && entry.started) entry.step.zero_();
}

void OptimizerState::note_started(size_t p) {
  if (started_.empty() || started_.back() != p) started_.push_back(p);
}

void OptimizerState::begin_step(size_t p, size_t num_states) {
  auto& entry = entries_[p];
  const size_t before = entry.num_states;
  allocate(entry, num_states);
  if (!entry.started || entry.num_states != before) note_started(p);
  entry.started = true;
  if (!counts_.defined()) entry.count() += 1;
}

void OptimizerState::take_back_step(size_t p) {
  auto& entry = entries_[p];
  entry.count() -= 1;
  if (entry.count() > 0 || entry.num_states > 0) return;
  entry.started = false;
  std::erase(started_, p);
}

const std::vector<const char*>& OptimizerState::names() const noexcept {
  static const std::vector<const char*> names[] = {
      {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, {"momentum_buffer"}, {"sum"}};
  return names[algorithm_];
}

std::vector<float> OptimizerState::step_counts() const {
  std::vector<float> counts;
  const auto streamed = counts_.defined() ? counts_.cpu() : at::Tensor();
  for (size_t p = 0; p < entries_.size(); ++p) {
    counts.push_back(streamed.defined() ? streamed.const_data_ptr<float>()[p] : entries_[p].count());
  }
  return counts;
}

OptimizerState::Standing OptimizerState::standing(size_t p) const {
  const auto& entry = entries_[p];
  Standing standing;
  // Of a shard of SGD's the count belongs to the rank that has the buffer, which may begin it anew.
  const bool is_own = algorithm_ == kSgd && shard_.size > 1;
  if (!counts_.defined() && !is_own) standing.steps = relevant_steps(entry.count());
  standing.started = entry.started;
  if (!entry.started || entry.parameter.is_row_wise || entry.parameter.tensor.numel() == 0) return standing;
  for (size_t which = 0; which <= StateEntry::kMaster && !standing.has_own_state; ++which) {
    standing.has_own_state = entry.tensor(which).defined() && !entry.is_common(which);
  }
  return standing;
}

float OptimizerState::relevant_steps(float count) const noexcept {
  return algorithm_ == kSgd ? std::min(count, 1.0F) : count;
}

void OptimizerState::set(size_t parameter, size_t which, const at::Tensor& whole) {
  if (which >= names().size()) {
    throw InvalidArgument("state tensor " + std::to_string(which) + " was given to an optimizer that has " +
                          std::to_string(names().size()));
  }
  auto& entry = entries_.at(parameter);
  auto sizes = entry.parameter.tensor.sizes().vec();
  auto values = whole;
  if (entry.parameter.is_row_wise) {
    if (whole.sizes() == at::IntArrayRef(sizes)) values = whole.mean(1, /*keepdim=*/true, at::kDouble);
    sizes[1] = 1;
  }
  follow_before_set(entry);
  const bool is_part = shard_.size > 1 && whole.sizes() == at::IntArrayRef({entry.run.count});
  if (!is_part) check_sizes(entry, values, sizes);
  allocate(entry, which);
  auto state = empty_state(entry);  // others may hold the tensor that was there
  if (state.defined()) copy_all({{state, is_part ? values : own_part(entry, values)}});
  entry.states[which] = std::move(state);
  entry.num_states = std::max(entry.num_states, which + 1);
  entry.common[which] = nullptr;
  entry.started = entry.was_given = true;
}

void OptimizerState::set_step_count(size_t parameter, double count) {
  auto& entry = entries_.at(parameter);
  if (!counts_.defined()) entry.step = at::zeros({}, at::kFloat);
  entry.step.fill_(count);
  entry.started = entry.was_given = true;
}

void OptimizerState::set_master(size_t parameter, const at::Tensor& whole) {
  auto& entry = entries_.at(parameter);
  follow_before_set(entry);
  const bool is_part = shard_.size > 1 && whole.defined() && whole.sizes() == at::IntArrayRef({entry.run.count});
  if (whole.defined() && !is_part) check_sizes(entry, whole, entry.parameter.tensor.sizes());
  if (!entry.master.defined()) return;
  entry.was_given = true;
  entry.common[StateEntry::kMaster] = nullptr;
  entry.master = whole.defined() ? empty_state(entry) : zero_state(entry);
  if (whole.defined()) entry.master.copy_(is_part ? whole : own_part(entry, whole));
}

void OptimizerState::reset(size_t parameter) {
  auto& entry = entries_.at(parameter);
  set_step_count(parameter, 0);
  for (auto& state : entry.states) state.reset();
  std::fill(std::begin(entry.common), std::end(entry.common), nullptr);
  entry.num_states = 0;
  entry.started = false;
  // A shard's sizes change together: see follow_sizes.
  if (shard_.size == 1 || !entry.is_resized()) follow(entry);
  entry.master = new_master(entry);
}

void OptimizerState::check_sizes(const StateEntry& entry, const at::Tensor& whole, at::IntArrayRef sizes) const {
  if (whole.sizes() == sizes) return;
  throw InvalidArgument("optimizer state of shape " + c10::str(whole.sizes()) + " for parameter '" +
                        entry.parameter.name + "', whose state has shape " + c10::str(sizes) +
                        "; load the state that was saved with this model");
}

std::vector<std::vector<Run>> OptimizerState::runs_for(const std::vector<int>& parts_of_rank) const {
  std::vector<int64_t> numels;
  for (const auto& entry : entries_) numels.push_back(entry.parameter.tensor.numel());
  const auto ranks = static_cast<int>(parts_of_rank.size());
  std::vector<std::vector<Run>> runs;
  for (int r = 0; r < ranks; ++r) {
    const int parts = parts_of_rank[static_cast<size_t>(r)];
    for (int part = 0; part < parts; ++part) runs.push_back(runs_of(numels, {r, ranks}, {part, parts}));
  }
  return runs;
}

at::Tensor OptimizerState::whole(size_t parameter, size_t which, comm::Communicator& ranks) const {
  const auto& entry = entries_.at(parameter);
  if (which == StateEntry::kMaster ? !has_master(entry.dtype) : which >= entry.num_states) return {};
  if (shard_.size > 1) check_shard_sizes();
  const auto own = entry.current(which);
  if (shard_.size == 1) return own.clone();
  const auto& tensor = entry.parameter.tensor;
  const auto whole =
      at::empty_strided(tensor.sizes(), tensor.strides(), device_options(accumulation_dtype(entry.dtype)));
  const auto memory = elements_of(whole, {0, whole.numel()});
  if (own.defined()) memory.narrow(0, entry.run.begin, entry.run.count).copy_(own);
  std::vector<std::vector<Run>> runs;
  for (const auto& of_rank : runs_for(undivided(shard_.size))) runs.push_back({of_rank[parameter]});
  exchange_runs({memory}, runs, ranks);
  return whole;
}

std::vector<size_t> OptimizerState::take_started() { return std::exchange(started_, {}); }

}  // namespace muster
