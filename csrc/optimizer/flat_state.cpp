#include "optimizer/flat_state.h"

#include <torch/enum.h>

#include <utility>

#include "muster/error.h"
#include "muster/optim.h"

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
void publish_steps(const FlatState& state, const Optimizer& optimizer) {
  const auto counts = state.flat.step_counts();
  for (size_t p = 0; p < state.parameters.size(); ++p) {
    const auto found = optimizer.state().find(state.parameters[p]);
    if (found == optimizer.state().end()) continue;
    int64_t* const step = step_of(static_cast<typename K::ParamState&>(*found->second));
    if (step != nullptr) *step = static_cast<int64_t>(counts[p]);
  }
}

template <class K>
void publish(FlatState& state, Optimizer& optimizer, const std::vector<size_t>& fresh) {
  using ParamState = typename K::ParamState;
  for (const size_t p : fresh) {
    auto entry = std::make_unique<ParamState>();
    const auto tensors = tensors_of(*entry);
    for (size_t s = 0; s < tensors.size(); ++s) *tensors[s] = state.flat.state(p, s);
    optimizer.state()[state.parameters[p]] = std::move(entry);
  }
  if (!state.flat.is_streamed()) publish_steps<K>(state, optimizer);
}

}  // namespace

struct FlatAccess {
  template <class O>
  static std::shared_ptr<FlatState>& state(O& optimizer) {
    return optimizer.flat_;
  }
};

std::shared_ptr<FlatState>* flat_state_of(Optimizer& optimizer) {
  std::shared_ptr<FlatState>* state = nullptr;
  visit_kind(optimizer, [&](auto kind) {
    state = &FlatAccess::state(dynamic_cast<typename decltype(kind)::Optimizer&>(optimizer));
  });
  return state;
}

std::vector<at::Tensor> parameters_of(const Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups()) {
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  }
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

void adopt_state(FlatState& state, Optimizer& optimizer) {
  visit_kind(optimizer, [&](auto kind) {
    using K = decltype(kind);
    std::vector<size_t> adopted;
    for (size_t p = 0; p < state.parameters.size(); ++p) {
      const auto found = optimizer.state().find(state.parameters[p]);
      if (found == optimizer.state().end()) continue;
      auto& entry = static_cast<typename K::ParamState&>(*found->second);
      const auto tensors = tensors_of(entry);
      for (size_t s = 0; s < tensors.size(); ++s) {
        if (tensors[s]->defined()) state.flat.set_state(p, s, *tensors[s]);
      }
      const int64_t* const step = step_of(entry);
      state.flat.set_step_count(p, step != nullptr ? static_cast<double>(*step) : 1.0);
      adopted.push_back(p);
    }
    publish<K>(state, optimizer, adopted);
  });
}

void publish_state(FlatState& state, Optimizer& optimizer) {
  visit_kind(optimizer, [&](auto kind) { publish<decltype(kind)>(state, optimizer, state.flat.take_started()); });
}

void publish_step_counts(const FlatState& state, const Optimizer& optimizer) {
  visit_kind(optimizer, [&](auto kind) { publish_steps<decltype(kind)>(state, optimizer); });
}

}  // namespace muster::detail

namespace muster::optim {

template <class Base>
at::Tensor Flat<Base>::step(typename Base::LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode enabled(true);
    loss = closure();
  }
  const auto tensors = detail::parameters_of(*this);
  std::vector<c10::TensorImpl*> parameters;
  for (const auto& tensor : tensors) parameters.push_back(tensor.unsafeGetTensorImpl());
  const auto groups = detail::groups_of(*this);
  if (!flat_ || flat_->parameters != parameters) {
    std::vector<FlatParameter> flat;
    uint32_t number = 0;
    for (const auto& group : this->param_groups()) {
      for (const auto& tensor : group.params()) flat.push_back({std::to_string(flat.size()), tensor, number});
      ++number;
    }
    flat_ =
        std::make_shared<detail::FlatState>(detail::FlatState{parameters, {}, FlatOptimizer(std::move(flat), groups)});
    detail::adopt_state(*flat_, *this);
  }
  flat_->flat.step_from_grad(groups);
  detail::publish_state(*flat_, *this);
  return loss;
}

template <class Base>
void Flat<Base>::save(torch::serialize::OutputArchive& archive) const {
  if (flat_) detail::publish_step_counts(*flat_, *this);
  Base::save(archive);
}

template <class Base>
void Flat<Base>::load(torch::serialize::InputArchive& archive) {
  Base::load(archive);
  flat_.reset();
}

template class Flat<torch::optim::AdamW>;
template class Flat<torch::optim::Adam>;
template class Flat<torch::optim::SGD>;
template class Flat<torch::optim::Adagrad>;

}  // namespace muster::optim
