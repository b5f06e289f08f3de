#include "strategy/saved_modules.h"

#include <map>
#include <set>
#include <utility>
#include <vector>

#include "device/host_copy.h"
#include "muster/error.h"
#include "muster/sharded_embedding.h"
#include "strategy/saved_optimizer.h"
#include "strategy/saved_tables.h"

namespace muster::detail {

namespace {

using Dict = SavedValue::Dict;

std::string weight_of(const std::string& embedding) { return embedding.empty() ? "weight" : embedding + ".weight"; }

// What state_dict() has in Python: parameters and buffers by name, without weights that servers alone hold. Rows that
// servers hold are not fetched.
std::map<std::string, at::Tensor> tensors_of(const torch::nn::Module& module) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& parameter : module.named_parameters()) tensors[parameter.key()] = parameter.value();
  for (const auto& buffer : module.named_buffers()) {
    if (buffer.value().defined()) tensors[buffer.key()] = buffer.value();
  }
  for (const auto& submodule : module.named_modules()) {
    if (is_on_servers(*submodule.value())) tensors.erase(weight_of(submodule.key()));
  }
  return tensors;
}

std::vector<std::string> names_of(const auto& values) {
  std::vector<std::string> names;
  for (const auto& [name, value] : values) names.push_back(name);
  return names;
}

}  // namespace

Dict state_of_module(const torch::nn::Module& module) {
  auto tensors = tensors_of(module);
  for (const auto& submodule : module.named_modules()) {
    const auto* const embedding = submodule.value()->as<ShardedEmbeddingImpl>();
    if (embedding == nullptr || embedding->options().on_servers) continue;
    tensors[weight_of(submodule.key())] = embedding->whole_weight();
  }
  return {tensors.begin(), tensors.end()};
}

std::vector<std::string> parameter_names(const torch::nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& parameter : module.named_parameters()) names.push_back(parameter.key());
  return names;
}

void check_module(const torch::nn::Module& module, const Dict& saved, const std::string& what) {
  const auto ours = tensors_of(module);
  compare_names(names_of(ours), names_of(saved), what);
  for (const auto& [name, tensor] : ours) {
    const auto& theirs = saved.at(name).get<at::Tensor>();
    if (tensor.sizes() == theirs.sizes()) continue;
    throw LayoutMismatch("'" + name + "' of " + what + " has shape " + c10::str(tensor.sizes()) +
                         ", and in the checkpoint " + c10::str(theirs.sizes()) + "; build the model that was saved");
  }
}

void take_module(const torch::nn::Module& module, const Dict& saved) {
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  std::set<const void*> taken;  // one tensor may have several names
  for (const auto& [name, tensor] : tensors_of(module)) {
    if (taken.insert(tensor.unsafeGetTensorImpl()).second)
      copies.emplace_back(tensor, saved.at(name).get<at::Tensor>());
  }
  copy_all(copies);
}

}  // namespace muster::detail
