// The optimizers of a C++ strategy: the sets that they make, and their state's way to the core and back.
#include <algorithm>
#include <numeric>
#include <string>

#include "core/heap.h"
#include "embedding/row_source.h"
#include "muster/error.h"
#include "optimizer/flat_state.h"
#include "strategy/registration.h"
#include "strategy/strategy_state.h"

namespace muster {

torch::optim::Optimizer& Strategy::State::optimizer(size_t position) const {
  const auto& life = lives.at(position);
  if (life && life->expired()) {
    throw InvalidArgument("optimizer " + std::to_string(position) +
                          ", which was prepared, is gone; it must live until the strategy's last step, save and load");
  }
  return *optimizers[position];
}

namespace {

void check_rows_can_start(torch::optim::Optimizer& optimizer) {
  const auto* const adagrad = dynamic_cast<const torch::optim::AdagradOptions*>(&optimizer.defaults());
  if (adagrad == nullptr || adagrad->initial_accumulator_value() == 0) return;
  for (const auto& parameter : detail::parameters_of(optimizer)) {
    if (!is_row_stub(parameter)) continue;
    throw InvalidArgument(c10::str("initial_accumulator_value=", adagrad->initial_accumulator_value()) +
                          ": rows on parameter servers start at 0; leave it out");
  }
}

}  // namespace

OptimizerSets::Choice Strategy::State::choice_of(std::vector<int> positions) const {
  OptimizerSets::Choice choice;
  choice.is_whatever_is_prepared = positions.empty();
  choice.optimizers = std::move(positions);
  if (choice.is_whatever_is_prepared) {
    choice.optimizers.resize(optimizers.size());
    std::iota(choice.optimizers.begin(), choice.optimizers.end(), 0);
  }
  for (const int position : choice.optimizers) {
    for (const auto& parameter : detail::parameters_of(optimizer(static_cast<size_t>(position)))) {
      choice.look.push_back(reinterpret_cast<uintptr_t>(parameter.unsafeGetTensorImpl()));
    }
  }
  if (choice.optimizers.empty())
    choice.look.push_back(static_cast<uint64_t>(core->session().registry().num_parameters()));
  return choice;
}

int Strategy::State::set_of(const StepOptions& options) {
  std::vector<int> positions;
  for (auto& optimizer : options.optimizers) {
    const auto found = std::find(optimizers.begin(), optimizers.end(), &optimizer.get());
    if (found == optimizers.end()) {
      throw InvalidArgument(
          "an optimizer in StepOptions::optimizers is not prepared; call strategy.prepare(optimizer)");
    }
    positions.push_back(static_cast<int>(found - optimizers.begin()));
  }
  auto choice = choice_of(std::move(positions));
  const auto chosen = choice.optimizers;
  const int set = sets.set_of(std::move(choice), [&] { return members_of(chosen); }, !options.optimizers.empty());
  const auto stepping = optimizers_of(set);
  for (auto* optimizer : stepping) bind_flat(*optimizer);
  if (core->sets().awaits_servers(set) && sets.is_fused(set)) {
    auto& first = *stepping.front();
    check_rows_can_start(first);
    auto& flat = **detail::flat_state_of(first);
    detail::follow_state(flat, first);
    core->sets().connect_servers(set, flat.flat, flat.indices, detail::groups_of(first));
    serve(first);
    return_freed_memory();  // tables, and state that servers have now
    StepCall update;
    update.set = set;
    add_update(update);
    loaders.joined(core->stepper().watch(update));
  }
  return set;
}

std::vector<OptimizerSets::Member> Strategy::State::members_of(const std::vector<int>& positions) const {
  auto& registry = core->session().registry();
  std::vector<OptimizerSets::Member> members;
  bool has_parameters = positions.empty() && registry.num_parameters() > 0;
  for (const int position : positions) {
    auto& its_optimizer = optimizer(static_cast<size_t>(position));
    auto& member = members.emplace_back();
    member.is_flat = core->session().options().fuse && detail::flat_state_of(its_optimizer) != nullptr;
    for (const auto& parameter : detail::parameters_of(its_optimizer)) {
      has_parameters = true;
      member.parameters.push_back(detail::index_of(registry, parameter));
    }
  }
  if (!has_parameters) throw InvalidArgument("no module with parameters is prepared; prepare() one before step()");
  return members;
}

std::vector<torch::optim::Optimizer*> Strategy::State::optimizers_of(int set) const {
  std::vector<torch::optim::Optimizer*> result;
  for (const int position : sets.optimizers_of(set)) result.push_back(&optimizer(static_cast<size_t>(position)));
  return result;
}

// From here on servers hold the optimizer's state.
void Strategy::State::serve(torch::optim::Optimizer& optimizer) {
  const auto& flat = *detail::flat_state_of(optimizer);
  served = {flat, &optimizer};
  detail::leave_to_servers(
      *flat, optimizer, [owner = core.get(), indices = flat->indices](const std::vector<size_t>& which) {
        constexpr server::Part kParts[] = {server::Part::state0, server::Part::state1, server::Part::state2,
                                           server::Part::master, server::Part::steps};
        std::vector<server::Part> parts;
        for (const size_t w : which) parts.push_back(kParts[w]);
        return owner->state_on_servers(indices, parts, /*to_stay=*/true);
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
      indices.push_back(core->session().registry().find(parameter));
    }
    check_need_no_flat(core->session(), indices);
    if (!core->session().options().shard_optimizer) return;
    throw InvalidArgument("shard_optimizer needs flat optimizers: muster::optim::AdamW, Adam, SGD or Adagrad");
  }
  if (*flat && detail::has_all(**flat, optimizer) && (*flat)->owner.lock() == core) {
    if ((*flat)->from_servers) detail::follow_state(**flat, optimizer);
    return;
  }
  if (core->sets().has_servers()) {
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
  std::vector<c10::TensorImpl*> parameters;
  std::vector<int> indices;
  std::vector<std::pair<int, uint32_t>> grouped;
  uint32_t number = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      parameters.push_back(parameter.unsafeGetTensorImpl());
      indices.push_back(core->session().registry().find(parameter));
      grouped.emplace_back(indices.back(), number);
    }
    ++number;
  }
  auto state = std::make_shared<detail::FlatState>(
      detail::FlatState{std::move(parameters), std::move(indices),
                        make_flat(core->session(), grouped, detail::groups_of(optimizer)), core});
  state->check_step_by_hand = [owner = std::weak_ptr<const StrategyCore>(core), own = state.get()] {
    const auto strategy = owner.lock();
    if (!strategy || strategy->session().closed() || !strategy->stepper().gradients_are_applied()) return;
    const bool has_gradients = std::any_of(own->parameters.begin(), own->parameters.end(),
                                           [](c10::TensorImpl* p) { return p->grad().defined(); });
    if (has_gradients) return;
    throw InvalidArgument(
        "an optimizer's step() was called after strategy.step, which has applied the gradients already; remove the "
        "call, or write gradients by hand with backward() first");
  };
  detail::replace_state(optimizer, std::move(state));
}

void Strategy::State::add_update(StepCall& call) {
  const auto stepping = optimizers_of(call.set);
  if (sets.is_fused(call.set)) {
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
  const auto stepping = optimizers_of(set);
  const auto made = core->stepper().updates().count(set) - before;
  for (size_t i = 0; i < stepping.size() && i < made; ++i) {
    auto& flat = **detail::flat_state_of(*stepping[i]);
    if (!flat.from_servers) detail::publish_state(flat, *stepping[i]);
  }
}

}  // namespace muster
