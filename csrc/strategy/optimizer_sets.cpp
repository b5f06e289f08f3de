#include "strategy/optimizer_sets.h"

#include <algorithm>
#include <numeric>

namespace muster {

int OptimizerSets::set_of(Choice choice, const Resolve& resolve, bool may_share) {
  auto known = find(choice);
  if (known == known_.end() || known->choice != choice) {
    const auto members = resolve();
    auto parameters = parameters_of(members);
    if (known == known_.end()) {
      const int set = core_->sets().set_of(std::move(parameters), may_share);
      known = known_.insert(known_.end(), Known{{}, set});
    } else {
      core_->sets().change_set(known->set, std::move(parameters));
    }
    known->is_fused =
        !members.empty() && std::all_of(members.begin(), members.end(), [](const Member& m) { return m.is_flat; });
    known->choice = std::move(choice);
  }
  used_[known->set] = {known->choice.optimizers, known->is_fused};
  return known->set;
}

std::vector<OptimizerSets::Known>::iterator OptimizerSets::find(const Choice& choice) {
  return std::find_if(known_.begin(), known_.end(), [&](const Known& known) {
    if (choice.is_whatever_is_prepared) return known.choice.is_whatever_is_prepared;
    return !known.choice.is_whatever_is_prepared && known.choice.optimizers == choice.optimizers;
  });
}

std::vector<int> OptimizerSets::parameters_of(const std::vector<Member>& members) const {
  std::vector<int> parameters;
  for (const auto& member : members) {
    parameters.insert(parameters.end(), member.parameters.begin(), member.parameters.end());
  }
  if (members.empty()) {
    parameters.resize(static_cast<size_t>(core_->session().registry().num_parameters()));
    std::iota(parameters.begin(), parameters.end(), 0);
  }
  std::sort(parameters.begin(), parameters.end());
  parameters.erase(std::unique(parameters.begin(), parameters.end()), parameters.end());
  return parameters;
}

std::vector<int> OptimizerSets::numbers() const {
  std::vector<int> numbers;
  for (const auto& [set, used] : used_) numbers.push_back(set);
  return numbers;
}

}  // namespace muster
