// Parameters that an optimizer is given twice.
#include <c10/core/TensorImpl.h>

#include <unordered_set>

#include "muster/optim.h"

namespace muster::detail {

std::vector<at::Tensor> each_once(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> once;
  std::unordered_set<const c10::TensorImpl*> known;
  for (const auto& parameter : parameters) {
    if (known.insert(parameter.unsafeGetTensorImpl()).second) once.push_back(parameter);
  }
  return once;
}

std::vector<torch::optim::OptimizerParamGroup> each_once(std::vector<torch::optim::OptimizerParamGroup> groups) {
  for (auto& group : groups) group.params() = each_once(group.params());
  return groups;
}

}  // namespace muster::detail
