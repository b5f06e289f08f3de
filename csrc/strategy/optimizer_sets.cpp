#include "strategy/optimizer_sets.h"

#include <algorithm>
#include <numeric>

#include "muster/error.h"

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
  check_window(*known);
  used_[known->set] = {known->choice.optimizers, known->is_fused};
  return known->set;
}

// Of optimizers of the same parameters, those that closed a window would step by all of its micro-batches.
void OptimizerSets::check_window(const Known& next) const {
  const auto used = used_.find(next.set);
  if (used == used_.end() || used->second.optimizers == next.choice.optimizers) return;
  const auto& chosen = next.choice.optimizers;
  const auto& before = used->second.optimizers;
  const bool has_all = std::all_of(before.begin(), before.end(), [&](int optimizer) {
    return std::find(chosen.begin(), chosen.end(), optimizer) != chosen.end();
  });
  if (has_all || !core_->sets().at(next.set).window_open()) return;
  throw InvalidArgument(
      "other optimizers= of the same parameters opened a window of several micro-batches, which is open; close that "
      "first, with flush() say");
}

std::vector<OptimizerSets::Known>::iterator OptimizerSets::find(const Choice& choice) {
  return std::find_if(known_.begin(), known_.end(), [&](const Known& known) {
    if (choice.is_whatever_is_prepared) return known.choice.is_whatever_is_prepared;
    return !known.choice.is_whatever_is_prepared && known.choice.optimizers == choice.optimizers;
  });
}

std::vector<int> OptimizerSets::parameters_of(const std::vector<Member>& members) const {
  const auto& registry = core_->session().registry();
  if (members.empty()) {
    std::vector<int> all(registry.num_parameters());
    std::iota(all.begin(), all.end(), 0);
    return all;
  }
  std::map<int, const Member*> owners;
  for (const auto& member : members) {
    for (const int parameter : member.parameters) {
      if (owners.try_emplace(parameter, &member).first->second == &member) continue;
      throw InvalidArgument("parameter '" + registry.name(static_cast<size_t>(parameter)) +
                            "' belongs to two optimizers that would step together; say with optimizers= whose step "
                            "it is");
    }
  }
  std::vector<int> parameters;
  for (const auto& [parameter, owner] : owners) parameters.push_back(parameter);
  return parameters;
}

std::vector<int> OptimizerSets::numbers() const {
  std::vector<int> numbers;
  for (const auto& [set, used] : used_) numbers.push_back(set);
  return numbers;
}

}  // namespace muster
