#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <unordered_map>

#include "muster/error.h"
#include "strategy/strategy_state.h"

namespace muster::detail {

namespace {

// The tensors of `module` by the names of `first`. Those that are one tensor in `first` must be one here.
NamedTensors by_names_of(const torch::OrderedDict<std::string, at::Tensor>& first,
                         const torch::OrderedDict<std::string, at::Tensor>& here) {
  NamedTensors named;
  std::unordered_map<const c10::TensorImpl*, const at::Tensor*> seen;
  for (const auto& item : first) {
    const auto* tensor = here.find(item.key());
    if (tensor == nullptr || first.size() != here.size()) {
      throw InvalidArgument("the replicas of a module are not built alike: only replica 0 has '" + item.key() +
                            "', or it has another number of tensors; the factory must build equal modules");
    }
    if (!item.value().defined()) continue;
    const auto [known, is_new] = seen.emplace(item.value().unsafeGetTensorImpl(), tensor);
    if (is_new) {
      named.emplace_back(item.key(), *tensor);
    } else if (!known->second->is_same(*tensor)) {
      throw InvalidArgument("'" + item.key() +
                            "' is shared with another tensor of the module in replica 0, but not in "
                            "its clone; prepare a factory instead: prepare([] { return Net(); })");
    }
  }
  return named;
}

using Modules = PreparedModule::Modules;

// In pre-order, as modules() of torch, which makes a name of each.
void add_modules(const std::shared_ptr<torch::nn::Module>& module, Modules& all) {
  all.push_back(module);
  for (const auto& child : module->children()) add_modules(child, all);
}

// Behind the last one for a module that is not among them.
size_t place_of(const torch::nn::Module& module, const Modules& modules) {
  const auto found =
      std::find_if(modules.begin(), modules.end(), [&](const auto& each) { return each.get() == &module; });
  return static_cast<size_t>(found - modules.begin());
}

std::string name_in(const torch::nn::Module& whole, const std::shared_ptr<torch::nn::Module>& module) {
  for (const auto& item : whole.named_modules(std::string(), /*include_self=*/false)) {
    if (item.value() == module) return item.key();
  }
  return "";
}

}  // namespace

PreparedModule::PreparedModule(Modules replicas) : replicas_(std::move(replicas)) {
  for (const auto& replica : replicas_) {
    add_modules(replica, submodules_.emplace_back());
    if (submodules_.back().size() != submodules_.front().size()) {
      throw InvalidArgument(
          "the replicas of a module have different numbers of submodules; the factory must build "
          "equal modules");
    }
  }
  for (auto& of_replica : tensors().buffers) {
    buffers_.emplace_back();
    for (auto& [name, buffer] : of_replica) buffers_.back().push_back(std::move(buffer));
  }
  noted_.resize(buffers_.front().size());
}

ModuleTensors PreparedModule::tensors() const {
  const auto parameters = replicas_.front()->named_parameters();
  const auto buffers = replicas_.front()->named_buffers();
  ModuleTensors tensors;
  for (const auto& replica : replicas_) {
    tensors.parameters.push_back(by_names_of(parameters, replica->named_parameters()));
    tensors.buffers.push_back(by_names_of(buffers, replica->named_buffers()));
  }
  return tensors;
}

void PreparedModule::check_submodules() {
  if (replicas_.size() == 1) return;
  Modules now;
  add_modules(replicas_.front(), now);
  if (now == submodules_.front()) return;
  std::vector<Modules> of_all{std::move(now)};
  for (size_t r = 1; r < replicas_.size(); ++r) add_modules(replicas_[r], of_all.emplace_back());
  for (size_t r = 1; r < replicas_.size(); ++r) {
    for (size_t m = 0; m < of_all[0].size(); ++m) {
      if (m < of_all[r].size() && place_of(*of_all[0][m], submodules_[0]) == place_of(*of_all[r][m], submodules_[r])) {
        continue;
      }
      throw InvalidArgument("submodule '" + name_in(*replicas_.front(), of_all[0][m]) +
                            "' was registered or replaced since prepare() in replica 0 alone, so that no other replica "
                            "would use it; change the module before prepare()");
    }
    if (of_all[r].size() == of_all[0].size()) continue;
    throw InvalidArgument(
        "a submodule was unregistered since prepare() in replica 0 alone, so that all others would use it; change the "
        "module before prepare()");
  }
  submodules_ = std::move(of_all);
}

void PreparedModule::follow_first_replica() {
  const at::NoGradGuard no_grad;
  for (size_t r = 1; r < replicas_.size(); ++r) {
    for (size_t m = 0; m < submodules_[r].size(); ++m) {
      const bool training = submodules_[0][m]->is_training();
      if (submodules_[r][m]->is_training() != training) submodules_[r][m]->train(training);
    }
  }
  for (size_t b = 0; b < noted_.size(); ++b) {
    const auto& first = buffers_[0][b];
    if (noted_[b] == WriteTrace::of(first, kSamplesOfBuffer)) continue;
    for (size_t r = 1; r < replicas_.size(); ++r) {
      auto& other = buffers_[r][b];
      if (other.sizes() == first.sizes() && other.scalar_type() == first.scalar_type()) {
        other.copy_(first);
      } else {
        other.set_data(first.detach().to(other.device(), first.scalar_type(), /*non_blocking=*/false, /*copy=*/true));
      }
    }
  }
}

void PreparedModule::note_buffers() {
  for (size_t b = 0; b < noted_.size(); ++b) noted_[b] = WriteTrace::of(buffers_[0][b], kSamplesOfBuffer);
}

}  // namespace muster::detail
