#include "optimizer/flat_state.h"

#include <ATen/ops/full.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/ScopeExit.h>
#include <torch/enum.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>

#include "muster/error.h"
#include "muster/optim.h"
#include "optimizer/masters.h"

namespace muster::detail {

namespace {

using torch::optim::Optimizer;

kernels::AdamGroup adam_group(double lr, std::tuple<double, double> betas, double eps, double weight_decay,
                              bool amsgrad, bool decoupled) {
  kernels::AdamGroup group{};
  group.lr = lr;
  group.beta1 = std::get<0>(betas);
  group.beta2 = std::get<1>(betas);
  group.eps = eps;
  group.weight_decay = weight_decay;
  group.decoupled = decoupled;
  group.amsgrad = amsgrad;
  return group;
}

kernels::AdamGroup group_of(const torch::optim::AdamWOptions& o) {
  return adam_group(o.lr(), o.betas(), o.eps(), o.weight_decay(), o.amsgrad(), true);
}
kernels::AdamGroup group_of(const torch::optim::AdamOptions& o) {
  return adam_group(o.lr(), o.betas(), o.eps(), o.weight_decay(), o.amsgrad(), false);
}
kernels::SgdGroup group_of(const torch::optim::SGDOptions& o) {
  kernels::SgdGroup group{};
  group.lr = o.lr();
  group.momentum = o.momentum();
  group.dampening = o.dampening();
  group.weight_decay = o.weight_decay();
  group.nesterov = o.nesterov();
  return group;
}
kernels::AdagradGroup group_of(const torch::optim::AdagradOptions& o) {
  kernels::AdagradGroup group{};
  group.lr = o.lr();
  group.lr_decay = o.lr_decay();
  group.eps = o.eps();
  group.weight_decay = o.weight_decay();
  return group;
}

// A param state's tensors in the order of FlatOptimizer's, and its step count where it has one.
template <class S>
std::vector<at::Tensor*> adam_tensors(S& s) {
  return {&s.exp_avg(), &s.exp_avg_sq(), &s.max_exp_avg_sq()};
}
std::vector<at::Tensor*> tensors_of(torch::optim::AdamWParamState& s) { return adam_tensors(s); }
std::vector<at::Tensor*> tensors_of(torch::optim::AdamParamState& s) { return adam_tensors(s); }
std::vector<at::Tensor*> tensors_of(torch::optim::SGDParamState& s) { return {&s.momentum_buffer()}; }
std::vector<at::Tensor*> tensors_of(torch::optim::AdagradParamState& s) { return {&s.sum()}; }

// SGD counts no steps: with a buffer, the first one is past.
int64_t* step_of(torch::optim::SGDParamState&) { return nullptr; }
int64_t* step_of(auto& s) { return &s.step(); }

// The types that belong to one algorithm.
template <class O, class Options, class State>
struct Kind {
  using Optimizer = O;
  using GroupOptions = Options;
  using ParamState = State;
};

// Calls `function` with the Kind of a flat optimizer; false for any other.
template <class F>
bool visit_kind(const Optimizer& optimizer, const F& function) {
  if (dynamic_cast<const optim::AdamW*>(&optimizer) != nullptr) {
    function(Kind<optim::AdamW, torch::optim::AdamWOptions, torch::optim::AdamWParamState>());
  } else if (dynamic_cast<const optim::Adam*>(&optimizer) != nullptr) {
    function(Kind<optim::Adam, torch::optim::AdamOptions, torch::optim::AdamParamState>());
  } else if (dynamic_cast<const optim::SGD*>(&optimizer) != nullptr) {
    function(Kind<optim::SGD, torch::optim::SGDOptions, torch::optim::SGDParamState>());
  } else if (dynamic_cast<const optim::Adagrad*>(&optimizer) != nullptr) {
    function(Kind<optim::Adagrad, torch::optim::AdagradOptions, torch::optim::AdagradParamState>());
  } else {
    return false;
  }
  return true;
}

template <class K>
void publish_steps(FlatState& state, const Optimizer& optimizer) {
  const auto counts = state.flat.state().step_counts();
  state.published_steps.resize(counts.size(), -1);
  for (size_t p = 0; p < state.parameters.size(); ++p) {
    const auto found = optimizer.state().find(state.parameters[p]);
    if (found == optimizer.state().end()) continue;
    int64_t* const step = step_of(static_cast<typename K::ParamState&>(*found->second));
    state.published_steps[p] = static_cast<int64_t>(counts[p]);
    if (step != nullptr) *step = state.published_steps[p];
  }
}

template <class K>
void publish(FlatState& state, Optimizer& optimizer, const std::vector<size_t>& fresh) {
  using ParamState = typename K::ParamState;
  for (const size_t p : fresh) {
    auto& entry = optimizer.state()[state.parameters[p]];
    if (!entry) entry = std::make_unique<ParamState>();
    auto& values = static_cast<ParamState&>(*entry);
    const auto tensors = tensors_of(values);
    for (size_t s = 0; s < tensors.size(); ++s) *tensors[s] = state.flat.state().tensor(p, s);
    state.published_entries.resize(state.parameters.size());
    state.published_entries[p] = &values;
    state.published_steps.resize(state.parameters.size(), -1);
    if (const int64_t* const step = step_of(values)) state.published_steps[p] = *step;
  }
  if (!state.flat.is_streamed()) publish_steps<K>(state, optimizer);
}

}  // namespace

struct FlatAccess {
  template <class O>
  static std::shared_ptr<FlatState>& state(O& optimizer) {
    return optimizer.flat_;
  }
  template <class O>
  static std::vector<at::Tensor>& loaded_masters(O& optimizer) {
    return optimizer.loaded_masters_;
  }
  template <class O>
  static std::shared_ptr<const void> life(const O& optimizer) {
    return optimizer.life_;
  }
};

std::shared_ptr<FlatState>* flat_state_of(Optimizer& optimizer) {
  std::shared_ptr<FlatState>* state = nullptr;
  visit_kind(optimizer, [&](auto kind) {
    state = &FlatAccess::state(dynamic_cast<typename decltype(kind)::Optimizer&>(optimizer));
  });
  return state;
}

std::shared_ptr<const void> life_of(Optimizer& optimizer) {
  std::shared_ptr<const void> life;
  visit_kind(optimizer,
             [&](auto kind) { life = FlatAccess::life(dynamic_cast<typename decltype(kind)::Optimizer&>(optimizer)); });
  return life;
}

bool has_all(const FlatState& state, const Optimizer& optimizer) {
  size_t position = 0;
  for (uint32_t number = 0; number < optimizer.param_groups().size(); ++number) {
    for (const auto& parameter : optimizer.param_groups()[number].params()) {
      if (position == state.parameters.size() || state.parameters[position] != parameter.unsafeGetTensorImpl() ||
          state.flat.state().entry(position).parameter.group != number) {
        return false;
      }
      ++position;
    }
  }
  return position == state.parameters.size();
}

std::vector<at::Tensor> parameters_of(const Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups())
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  return parameters;
}

FlatGroups groups_of(const Optimizer& optimizer) {
  FlatGroups groups;
  visit_kind(optimizer, [&](auto kind) {
    using Options = typename decltype(kind)::GroupOptions;
    std::vector<decltype(group_of(std::declval<const Options&>()))> list;
    for (const auto& group : optimizer.param_groups())
      list.push_back(group_of(static_cast<const Options&>(group.options())));
    groups = std::move(list);
  });
  return groups;
}

namespace {

// What torch's step starts anew where it is not there; of Adam, the maximum where amsgrad came later.
template <class ParamState>
bool may_lack(size_t which) {
  return std::is_same_v<ParamState, torch::optim::SGDParamState> || which == 2;
}

bool has_any(const std::vector<at::Tensor*>& tensors) {
  return std::any_of(tensors.begin(), tensors.end(), [](const at::Tensor* tensor) { return tensor->defined(); });
}

// Whether anything differs from what is held.
template <class ParamState>
bool take_values(FlatState& state, size_t p, ParamState& entry) {
  auto& flat = state.flat;
  const auto& own = flat.state().entry(p);
  bool changed = !own.started, begins_anew = false;
  const auto tensors = tensors_of(entry);
  for (size_t s = 0; s < tensors.size(); ++s) {
    const auto& given = *tensors[s];
    const auto held = flat.state().tensor(p, s);
    if (given.defined() ? given.is_same(held) : !held.defined()) continue;
    if (!given.defined() && !may_lack<ParamState>(s)) {
      throw InvalidArgument("the state of parameter " + std::to_string(p) +
                            " of an optimizer lacks a tensor; give it one, or erase the entry to start anew");
    }
    flat.state().set(p, s, given.defined() ? given : at::zeros_like(own.parameter.tensor, held.options()));
    begins_anew = begins_anew || !given.defined();
    changed = true;
  }
  const int64_t* const step = step_of(entry);
  // A device counts on while the entry tells what was published last.
  const bool is_stale = flat.is_streamed() && state.published_entries[p] == &entry;
  if (step != nullptr && ((changed && !is_stale) || *step != state.published_steps[p])) {
    flat.state().set_step_count(p, static_cast<double>(*step));
    changed = true;
  } else if (step == nullptr && changed) {
    flat.state().set_step_count(p, begins_anew ? 0 : 1);
  }
  return changed;
}

// Whether user code took away what is held: of plain SGD the master copy alone, which stands in no entry.
bool has_lost_state(const StateEntry& held, bool is_erased) {
  return held.started && (held.num_states > 0 || (is_erased && has_master(held.dtype)));
}

template <class K>
void check_on_servers(const FlatState& state, Optimizer& optimizer) {
  for (auto* const parameter : state.parameters) {
    const auto found = optimizer.state().find(parameter);
    if (found != optimizer.state().end() && found->second &&
        !has_any(tensors_of(static_cast<typename K::ParamState&>(*found->second)))) {
      continue;
    }
    throw InvalidArgument(
        "an optimizer's state() was changed, and parameter servers hold it from the first step on; change it before "
        "the first step or after close()");
  }
}

}  // namespace

void follow_state(FlatState& state, Optimizer& optimizer) {
  if (state.is_lost) {
    throw InvalidArgument(
        "the parameter servers were gone when the strategy closed, and the optimizer's state with them; load() a saved "
        "one");
  }
  state.published_steps.resize(state.parameters.size(), -1);
  state.published_entries.resize(state.parameters.size());
  visit_kind(optimizer, [&](auto kind) {
    using K = decltype(kind);
    using ParamState = typename K::ParamState;
    if (state.from_servers) return check_on_servers<K>(state, optimizer);
    std::vector<size_t> changed;
    for (size_t p = 0; p < state.parameters.size(); ++p) {
      const auto found = optimizer.state().find(state.parameters[p]);
      auto* const entry = found == optimizer.state().end() ? nullptr : static_cast<ParamState*>(found->second.get());
      // A shard may have nothing of a parameter, and plain SGD nothing at all.
      const bool is_ours = entry != nullptr && (state.flat.shard().size > 1 || has_any(tensors_of(*entry)));
      if (is_ours) {
        if (take_values(state, p, *entry)) changed.push_back(p);
      } else if (has_lost_state(state.flat.state().entry(p), entry == nullptr && state.published_entries[p])) {
        state.flat.state().reset(p);
        if constexpr (std::is_same_v<ParamState, torch::optim::AdagradParamState>) {
          const double first =
              static_cast<const torch::optim::AdagradOptions&>(optimizer.defaults()).initial_accumulator_value();
          const auto anew = state.flat.state().empty_state(p);
          if (first == 0 || !anew.defined()) continue;
          state.flat.state().set(p, 0, anew.fill_(first));
          changed.push_back(p);
        }
      }
    }
    if (!changed.empty()) publish<K>(state, optimizer, changed);
  });
}

void leave_to_servers(FlatState& state, Optimizer& optimizer, FlatState::FromServers from_servers) {
  state.from_servers = std::move(from_servers);
  visit_kind(optimizer, [&](auto kind) {
    for (auto* const parameter : state.parameters)
      optimizer.state()[parameter] = std::make_unique<typename decltype(kind)::ParamState>();
  });
}

void copy_from_servers(const FlatState& state, Optimizer& optimizer) {
  visit_kind(optimizer, [&](auto kind) {
    using ParamState = typename decltype(kind)::ParamState;
    ParamState names;
    std::vector<size_t> which(tensors_of(names).size());
    std::iota(which.begin(), which.end(), 0);
    which.push_back(FlatState::kSteps);
    const auto states = state.from_servers(which);
    const auto& counts = states.back();
    constexpr bool kBeginsWithState = std::is_same_v<ParamState, torch::optim::AdagradParamState>;
    const auto own_counts = state.flat.state().step_counts();
    for (size_t p = 0; p < state.parameters.size(); ++p) {
      // Not of a parameter that was frozen when they took the others.
      const bool is_there = counts[p].defined();
      const double count = is_there ? counts[p].template item<double>() : own_counts[p];
      if (count <= 0 && !(kBeginsWithState && state.flat.state().entry(p).started)) {
        optimizer.state().erase(state.parameters[p]);
        continue;
      }
      auto entry = std::make_unique<ParamState>();
      const auto tensors = tensors_of(*entry);
      for (size_t s = 0; s < tensors.size(); ++s)
        *tensors[s] = is_there ? states[s][p] : state.flat.state().tensor(p, s);
      if (auto* const step = step_of(*entry)) *step = static_cast<int64_t>(count);
      optimizer.state()[state.parameters[p]] = std::move(entry);
    }
  });
}

void bring_back(FlatState& state, Optimizer& optimizer) noexcept {
  try {
    copy_from_servers(state, optimizer);
    const auto masters = masters_of(state, state.parameters);
    state.from_servers = nullptr;
    if (std::ranges::none_of(masters, &at::Tensor::defined)) return;  // the rest is taken over where it is used
    follow_state(state, optimizer);
    set_masters(state, optimizer, masters);
  } catch (const std::exception&) {
    state.from_servers = nullptr;
    state.is_lost = true;
  }
}

void replace_state(Optimizer& optimizer, std::shared_ptr<FlatState> state) {
  visit_kind(optimizer, [&](auto kind) {
    auto& flat = dynamic_cast<typename decltype(kind)::Optimizer&>(optimizer);
    auto& own = FlatAccess::state(flat);
    auto masters = std::exchange(FlatAccess::loaded_masters(flat), {});
    if (masters.empty() && own) masters = masters_of(*own, state->parameters);
    own = std::move(state);
    follow_state(*own, optimizer);
    set_masters(*own, optimizer, masters);
  });
}

std::vector<at::Tensor> masters_in(Optimizer& optimizer) {
  std::vector<at::Tensor> masters;
  visit_kind(optimizer, [&](auto kind) {
    auto& flat = dynamic_cast<typename decltype(kind)::Optimizer&>(optimizer);
    masters = FlatAccess::loaded_masters(flat);
    const auto& own = FlatAccess::state(flat);
    if (masters.empty() && own) masters = masters_of(*own, own->parameters);
  });
  return masters;
}

void leave_masters(Optimizer& optimizer, const std::vector<at::Tensor>& masters) {
  visit_kind(optimizer, [&](auto kind) {
    FlatAccess::loaded_masters(dynamic_cast<typename decltype(kind)::Optimizer&>(optimizer)) = masters;
  });
}

void publish_state(FlatState& state, Optimizer& optimizer) {
  visit_kind(optimizer,
             [&](auto kind) { publish<decltype(kind)>(state, optimizer, state.flat.state().take_started()); });
}

void publish_step_counts(FlatState& state, const Optimizer& optimizer) {
  visit_kind(optimizer, [&](auto kind) { publish_steps<decltype(kind)>(state, optimizer); });
}

}  // namespace muster::detail

namespace muster::optim {

template <class Base, class Options>
at::Tensor Flat<Base, Options>::step(typename Base::LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode enabled(true);
    loss = closure();
  }
  const auto groups = detail::groups_of(*this);
  if (flat_ && flat_->check_step_by_hand) flat_->check_step_by_hand();
  if (!flat_ || !detail::has_all(*flat_, *this)) {
    if (flat_) detail::follow_state(*flat_, *this);
    std::vector<c10::TensorImpl*> parameters;
    for (const auto& tensor : detail::parameters_of(*this)) parameters.push_back(tensor.unsafeGetTensorImpl());
    std::vector<FlatParameter> flat;
    uint32_t number = 0;
    for (const auto& group : this->param_groups()) {
      for (const auto& tensor : group.params()) flat.push_back({std::to_string(flat.size()), tensor, number});
      ++number;
    }
    detail::replace_state(*this, std::make_shared<detail::FlatState>(detail::FlatState{
                                     std::move(parameters), {}, FlatOptimizer(std::move(flat), groups)}));
  } else {
    detail::follow_state(*flat_, *this);
  }
  flat_->flat.step_from_grad(groups);
  detail::publish_state(*flat_, *this);
  return loss;
}

template <class Base, class Options>
void Flat<Base, Options>::save(torch::serialize::OutputArchive& archive) const {
  auto& self = const_cast<Flat&>(*this);  // what state() shows, and not what it is, changes
  if (flat_) detail::follow_state(*flat_, self);
  detail::write_masters(archive, flat_ ? detail::masters_of(*flat_, flat_->parameters) : loaded_masters_);
  if (flat_ && flat_->from_servers) {
    const auto from_servers = flat_->from_servers;
    detail::copy_from_servers(*flat_, self);
    const auto leave = c10::make_scope_exit([&] { detail::leave_to_servers(*flat_, self, from_servers); });
    return Base::save(archive);
  }
  if (flat_) detail::publish_step_counts(*flat_, *this);
  Base::save(archive);
}

template <class Base, class Options>
void Flat<Base, Options>::load(torch::serialize::InputArchive& archive) {
  if (flat_ && flat_->from_servers) {
    throw InvalidArgument(
        "parameter servers hold the optimizer's state from the first step on; load() before the first step or after "
        "close()");
  }
  Base::load(archive);
  flat_.reset();
  loaded_masters_ = detail::read_masters(archive, detail::parameters_of(*this).size());
}

template class Flat<torch::optim::AdamW, torch::optim::AdamWOptions>;
template class Flat<torch::optim::Adam, torch::optim::AdamOptions>;
template class Flat<torch::optim::SGD, torch::optim::SGDOptions>;
template class Flat<torch::optim::Adagrad, torch::optim::AdagradOptions>;

}  // namespace muster::optim
