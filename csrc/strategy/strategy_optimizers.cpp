// The optimizers of a C++ strategy: the sets that they make, and their state's way to the core and back.
#include <algorithm>
#include <numeric>

#include "muster/error.h"
#include "optimizer/flat_state.h"
#include "strategy/strategy_state.h"

namespace muster {

int Strategy::State::set_of(const StepOptions& options) {
  std::vector<torch::optim::Optimizer*> key;
  for (auto& optimizer : options.optimizers) {
    if (std::find(optimizers.begin(), optimizers.end(), &optimizer.get()) == optimizers.end()) {
      throw InvalidArgument(
          "an optimizer in StepOptions::optimizers is not prepared; call strategy.prepare(optimizer)");
    }
    key.push_back(&optimizer.get());
  }
  const auto& stepping = key.empty() ? optimizers : key;
  std::vector<c10::TensorImpl*> parameters;
  for (auto* optimizer : stepping) {
    for (const auto& group : optimizer->param_groups()) {
      for (const auto& parameter : group.params()) parameters.push_back(parameter.unsafeGetTensorImpl());
    }
  }
  auto& registry = core->registry();
  if (stepping.empty()) parameters.resize(registry.num_parameters());

  auto used = std::find_if(sets.begin(), sets.end(), [&](const OptimizerSet& s) { return s.optimizers == key; });
  if (used == sets.end() || used->parameters != parameters) {
    std::vector<int> indices(registry.num_parameters());
    std::iota(indices.begin(), indices.end(), 0);
    if (!stepping.empty()) indices.clear();
    for (auto* optimizer : stepping) {
      for (const auto& group : optimizer->param_groups()) {
        for (const auto& parameter : group.params()) {
          indices.push_back(registry.find(parameter));
          if (indices.back() >= 0) continue;
          throw InvalidArgument(
              "an optimizer has a parameter of shape " + c10::str(parameter.sizes()) +
              " that is in no prepared module; prepare() the module, and build the optimizer from the "
              "prepared module's parameters()");
        }
      }
    }
    std::sort(indices.begin(), indices.end());
    indices.erase(std::unique(indices.begin(), indices.end()), indices.end());
    if (indices.empty()) throw InvalidArgument("no module with parameters is prepared; prepare() one before step()");
    if (used == sets.end()) {
      const int set = core->set_of(std::move(indices));
      sets.push_back({key, {}, set});
      used = std::prev(sets.end());
    } else {
      core->change_set(used->set, std::move(indices));
    }
    used->parameters = std::move(parameters);
  }
  steppers[used->set] = stepping;
  for (auto* optimizer : stepping) bind_flat(*optimizer);
  if (core->awaits_servers(used->set) && is_fused(used->set)) {
    auto& first = *stepping.front();
    const auto& flat = **detail::flat_state_of(first);
    detail::follow_state(**detail::flat_state_of(first), first);
    core->connect_servers(used->set, flat.flat, flat.indices, detail::groups_of(first));
    serve(first);
    StepCall update;
    update.set = used->set;
    add_update(update);
    loaders.joined(core->watch(update));
  }
  return used->set;
}

// From here on servers hold the optimizer's state.
void Strategy::State::serve(torch::optim::Optimizer& optimizer) {
  const auto& flat = *detail::flat_state_of(optimizer);
  served = {flat, &optimizer};
  detail::leave_to_servers(*flat, optimizer, [owner = core.get(), indices = flat->indices](size_t which) {
    constexpr server::Part kParts[] = {server::Part::state0, server::Part::state1, server::Part::state2,
                                       server::Part::master, server::Part::steps};
    return owner->state_on_servers(indices, kParts[which], /*to_stay=*/true);
  });
}

void Strategy::State::leave_servers() noexcept {
  const auto flat = served.first.lock();
  if (flat && flat->from_servers) detail::bring_back(*flat, *served.second);
  served = {};
}

void Strategy::State::bind_flat(torch::optim::Optimizer& optimizer) {
  auto* const flat = detail::flat_state_of(optimizer);
  if (flat == nullptr) {
    std::vector<int> indices;
    for (const auto& parameter : detail::parameters_of(optimizer)) {
      indices.push_back(core->registry().find(parameter));
    }
    core->check_need_no_flat(indices);
    if (!core->options().shard_optimizer) return;
    throw InvalidArgument("shard_optimizer needs flat optimizers: muster::optim::AdamW, Adam, SGD or Adagrad");
  }
  std::vector<c10::TensorImpl*> parameters;
  for (const auto& parameter : detail::parameters_of(optimizer)) parameters.push_back(parameter.unsafeGetTensorImpl());
  if (*flat && (*flat)->parameters == parameters && (*flat)->owner.lock() == core) {
    if ((*flat)->from_servers) detail::follow_state(**flat, optimizer);
    return;
  }
  if (core->has_servers()) {
    throw InvalidArgument(
        "parameter servers step one optimizer, with the parameters that it has in the first step, and this is another "
        "one or has others since; give all parameters to one optimizer, as groups of it, before then");
  }
  if (*flat) {
    detail::follow_state(**flat, optimizer);
    if ((*flat)->flat.shard().size > 1 && (*flat)->owner.lock() != core) {
      throw InvalidArgument(
          "the optimizer's state was divided over the workers of another strategy, and here is a part of it; clear its "
          "state() to start anew");
    }
  }
  std::vector<int> indices;
  std::vector<std::pair<int, uint32_t>> grouped;
  uint32_t number = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      indices.push_back(core->registry().find(parameter));
      grouped.emplace_back(indices.back(), number);
    }
    ++number;
  }
  *flat = std::make_shared<detail::FlatState>(detail::FlatState{
      std::move(parameters), std::move(indices), core->make_flat(grouped, detail::groups_of(optimizer)), core});
  (*flat)->check_step_by_hand = [owner = std::weak_ptr<const StrategyCore>(core), own = flat->get()] {
    const auto strategy = owner.lock();
    if (!strategy || strategy->closed() || !strategy->gradients_are_applied()) return;
    const bool has_gradients = std::any_of(own->parameters.begin(), own->parameters.end(),
                                           [](c10::TensorImpl* p) { return p->grad().defined(); });
    if (has_gradients) return;
    throw InvalidArgument(
        "an optimizer's step() was called after strategy.step, which has applied the gradients already; remove the "
        "call, or write gradients by hand with backward() first");
  };
  detail::follow_state(**flat, optimizer);
}

bool Strategy::State::is_fused(int set) {
  const auto& stepping = steppers[set];
  return core->options().fuse && !stepping.empty() &&
         std::all_of(stepping.begin(), stepping.end(),
                     [](auto* optimizer) { return detail::flat_state_of(*optimizer) != nullptr; });
}

void Strategy::State::add_update(StepCall& call) {
  const auto& stepping = steppers[call.set];
  if (is_fused(call.set)) {
    for (auto* optimizer : stepping) {
      auto& flat = **detail::flat_state_of(*optimizer);
      detail::follow_state(flat, *optimizer);
      call.optimizers.push_back({&flat.flat, flat.indices, detail::groups_of(*optimizer)});
    }
    call.before_update = [stepping] {
      std::vector<FlatGroups> groups;
      for (auto* optimizer : stepping) {
        detail::follow_state(**detail::flat_state_of(*optimizer), *optimizer);
        groups.push_back(detail::groups_of(*optimizer));
      }
      return groups;
    };
    return;
  }
  for (auto* optimizer : stepping)
    call.optimizers.push_back({.hyperparameters = detail::learning_rates_of(*optimizer)});
  if (stepping.empty()) return;
  call.update_from_grad = [stepping] {
    for (auto* optimizer : stepping) optimizer->step();
  };
}

void Strategy::State::publish(int set, uint64_t before) {
  const auto& stepping = steppers[set];
  const auto made = core->num_updates(set) - before;
  for (size_t i = 0; i < stepping.size() && i < made; ++i) {
    auto& flat = **detail::flat_state_of(*stepping[i]);
    if (!flat.from_servers) detail::publish_state(flat, *stepping[i]);
  }
}

}  // namespace muster
