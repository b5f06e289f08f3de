#include "strategy/forgotten_modules.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <unordered_set>

#include "core/log.h"
#include "strategy/strategy_state.h"

namespace muster::detail {

namespace {

using Addresses = std::unordered_set<const c10::TensorImpl*>;

constexpr int kCompared = 2;     // parts
constexpr size_t kMaxNamed = 4;  // parameters

// Those that a backward of `loss` brings gradients to.
std::vector<at::Tensor> leaves_behind(const at::Tensor& loss) {
  using torch::autograd::AccumulateGrad;
  using torch::autograd::Node;
  std::vector<at::Tensor> leaves;
  std::unordered_set<Node*> seen;
  std::vector<Node*> nodes{loss.grad_fn().get()};
  while (!nodes.empty()) {
    auto* const node = nodes.back();
    nodes.pop_back();
    if (node == nullptr || !seen.insert(node).second) continue;
    for (const auto& edge : node->next_edges()) nodes.push_back(edge.function.get());
    if (const auto* const leaf = dynamic_cast<AccumulateGrad*>(node)) leaves.push_back(leaf->variable);
  }
  return leaves;
}

Addresses addresses_of(const std::vector<at::Tensor>& tensors) {
  Addresses addresses;
  for (const auto& tensor : tensors) addresses.insert(tensor.unsafeGetTensorImpl());
  return addresses;
}

Addresses parameters_of(const PreparedModule& module) {
  Addresses parameters;
  for (const auto& replica : module.replicas()) parameters.merge(addresses_of(replica->parameters()));
  return parameters;
}

bool have_common(const Addresses& some, const Addresses& others) {
  return std::any_of(some.begin(), some.end(), [&](const auto* each) { return others.contains(each); });
}

}  // namespace

void ForgottenModules::note(const torch::optim::Optimizer& optimizer) {
  const std::lock_guard lock(mutex_);
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) stepped_.insert(parameter.unsafeGetTensorImpl());
  }
}

ForgottenModules::Call ForgottenModules::watching(Call call, int set, const Strategy::State& strategy) {
  std::unique_lock lock(mutex_);
  auto& looked = looked_[{set, strategy.modules.size()}];
  if (looked.parts == kCompared) return call;
  lock.unlock();
  for (const auto* const optimizer : strategy.optimizers_of(set)) note(*optimizer);  // what was added since prepare()
  return [this, call = std::move(call), &looked, &strategy](int local_replica) {
    Loss loss = call(local_replica);
    if (loss.value.defined()) look(looked, loss.value, strategy);
    return loss;
  };
}

void ForgottenModules::look(Looked& looked, const at::Tensor& loss, const Strategy::State& strategy) {
  const std::lock_guard lock(mutex_);
  if (looked.parts == kCompared) return;
  auto leaves = leaves_behind(loss);
  const auto trained = addresses_of(leaves);
  std::string unstepped;
  for (const auto& module : strategy.modules) {
    const auto parameters = parameters_of(module);
    std::erase_if(leaves, [&](const auto& leaf) { return parameters.contains(leaf.unsafeGetTensorImpl()); });
    if (!have_common(parameters, trained) || have_common(parameters, stepped_)) continue;
    unstepped += (unstepped.empty() ? "" : ", ") + module.replicas().front()->name();
  }
  if (!unstepped.empty() && !stepped_.empty()) tell_of_unstepped(unstepped);
  if (++looked.parts == 1) {
    looked.unknown = std::move(leaves);
    return;
  }
  const auto before = addresses_of(std::exchange(looked.unknown, {}));
  std::erase_if(leaves, [&](const auto& leaf) { return !before.contains(leaf.unsafeGetTensorImpl()); });
  if (!leaves.empty() && strategy.core->session().topology().num_replicas > 1) tell_of_unprepared(leaves);
}

void ForgottenModules::tell_of_unprepared(const std::vector<at::Tensor>& parameters) {
  if (std::exchange(told_of_unprepared_, true)) return;
  std::string shapes;
  for (size_t i = 0; i < std::min(parameters.size(), kMaxNamed); ++i) {
    shapes += (shapes.empty() ? "" : ", ") + c10::str(parameters[i].sizes());
  }
  log(LogLevel::warning, "the loss of a step depends on parameters in no prepared module (" +
                             std::to_string(parameters.size()) + ", of shapes " + shapes +
                             (parameters.size() > kMaxNamed ? ", ..." : "") +
                             "): their gradients are not averaged, and the replicas of a process add to them at once; "
                             "prepare() their module and its optimizer, or freeze them with requires_grad_(false)");
}

void ForgottenModules::tell_of_unstepped(const std::string& names) {
  if (std::exchange(told_of_unstepped_, true)) return;
  log(LogLevel::warning, "no prepared optimizer has parameters of " + names +
                             ", which the loss of a step depends on: their gradients are dropped; prepare() its "
                             "optimizer, or freeze the module with requires_grad_(false)");
}

}  // namespace muster::detail
