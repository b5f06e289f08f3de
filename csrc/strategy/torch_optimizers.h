// The optimizers of torch::optim whose options and state are known, field by field, by the names of torch.optim's in
// Python.
#pragma once

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

namespace muster::detail {

// field(name, value) for each option of a group: double, bool, or a pair of doubles in a std::tuple.
template <class Field>
void visit_adam_options(auto& options, const Field& field) {
  field("lr", options.lr());
  field("betas", options.betas());
  field("eps", options.eps());
  field("weight_decay", options.weight_decay());
  field("amsgrad", options.amsgrad());
}
template <class Field>
void visit_fields(torch::optim::AdamOptions& options, const Field& field) {
  visit_adam_options(options, field);
}
template <class Field>
void visit_fields(torch::optim::AdamWOptions& options, const Field& field) {
  visit_adam_options(options, field);
}
template <class Field>
void visit_fields(torch::optim::SGDOptions& options, const Field& field) {
  field("lr", options.lr());
  field("momentum", options.momentum());
  field("dampening", options.dampening());
  field("weight_decay", options.weight_decay());
  field("nesterov", options.nesterov());
}
template <class Field>
void visit_fields(torch::optim::AdagradOptions& options, const Field& field) {
  field("lr", options.lr());
  field("lr_decay", options.lr_decay());
  field("weight_decay", options.weight_decay());
  field("initial_accumulator_value", options.initial_accumulator_value());
  field("eps", options.eps());
}
template <class Field>
void visit_fields(torch::optim::RMSpropOptions& options, const Field& field) {
  field("lr", options.lr());
  field("alpha", options.alpha());
  field("eps", options.eps());
  field("weight_decay", options.weight_decay());
  field("momentum", options.momentum());
  field("centered", options.centered());
}

// field(name, value) for what is kept of a parameter: tensors, defined or not, and an int64_t "step".
template <class Field>
void visit_adam_state(auto& state, const Field& field) {
  field("step", state.step());
  field("exp_avg", state.exp_avg());
  field("exp_avg_sq", state.exp_avg_sq());
  field("max_exp_avg_sq", state.max_exp_avg_sq());
}
template <class Field>
void visit_fields(torch::optim::AdamParamState& state, const Field& field) {
  visit_adam_state(state, field);
}
template <class Field>
void visit_fields(torch::optim::AdamWParamState& state, const Field& field) {
  visit_adam_state(state, field);
}
template <class Field>
void visit_fields(torch::optim::SGDParamState& state, const Field& field) {
  field("momentum_buffer", state.momentum_buffer());
}
template <class Field>
void visit_fields(torch::optim::AdagradParamState& state, const Field& field) {
  field("step", state.step());
  field("sum", state.sum());
}
template <class Field>
void visit_fields(torch::optim::RMSpropParamState& state, const Field& field) {
  field("step", state.step());
  field("square_avg", state.square_avg());
  field("momentum_buffer", state.momentum_buffer());
  field("grad_avg", state.grad_avg());
}

/// The types that belong to one optimizer.
template <class OptionsType, class StateType>
struct TorchOptimizer {
  using Options = OptionsType;
  using ParamState = StateType;
  const char* name;  ///< of its class in Python
};

/// Calls `function` with the TorchOptimizer of an optimizer, or of one that is derived from it; false for any other.
template <class F>
bool visit_torch_optimizer(const torch::optim::Optimizer& optimizer, const F& function) {
  using namespace torch::optim;  // NOLINT(google-build-using-namespace): twenty names of it
  if (dynamic_cast<const SGD*>(&optimizer) != nullptr) {
    function(TorchOptimizer<SGDOptions, SGDParamState>{"SGD"});
  } else if (dynamic_cast<const Adagrad*>(&optimizer) != nullptr) {
    function(TorchOptimizer<AdagradOptions, AdagradParamState>{"Adagrad"});
  } else if (dynamic_cast<const Adam*>(&optimizer) != nullptr) {
    function(TorchOptimizer<AdamOptions, AdamParamState>{"Adam"});
  } else if (dynamic_cast<const AdamW*>(&optimizer) != nullptr) {
    function(TorchOptimizer<AdamWOptions, AdamWParamState>{"AdamW"});
  } else if (dynamic_cast<const RMSprop*>(&optimizer) != nullptr) {
    function(TorchOptimizer<RMSpropOptions, RMSpropParamState>{"RMSprop"});
  } else {
    return false;
  }
  return true;
}

}  // namespace muster::detail
