#include "strategy/saved_optimizer.h"

#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <tuple>
#include <type_traits>
#include <utility>

#include "muster/error.h"
#include "optimizer/flat_state.h"
#include "optimizer/masters.h"
#include "strategy/saved_parts.h"
#include "strategy/torch_optimizers.h"

namespace muster::detail {

namespace {

using torch::optim::Optimizer;
using Dict = SavedValue::Dict;
using List = SavedValue::List;

constexpr const char* kSteps = "step";

// --- values --------------------------------------------------------------------------------------------------------

double number_of(const SavedValue& value) {
  if (value.holds<int64_t>()) return static_cast<double>(value.get<int64_t>());
  if (value.holds<at::Tensor>()) return value.get<at::Tensor>().item<double>();
  return value.get<double>();
}

SavedValue saved(double value) { return value; }
SavedValue saved(bool value) { return value; }
SavedValue saved(const std::tuple<double, double>& pair) {
  return SavedValue::Tuple{{std::get<0>(pair), std::get<1>(pair)}};
}

void take(double& into, const SavedValue& from) { into = number_of(from); }
void take(bool& into, const SavedValue& from) { into = from.get<bool>(); }
void take(std::tuple<double, double>& into, const SavedValue& from) {
  const auto& items = from.holds<List>() ? from.get<List>() : from.get<SavedValue::Tuple>().items;
  into = {number_of(items.at(0)), number_of(items.at(1))};
}

// Files of torch's may lack booleans that came later: then the default stays.
void take_option(const Dict& group, const char* name, auto& value) {
  if (std::is_same_v<std::remove_cvref_t<decltype(value)>, bool> && !group.contains(name)) return;
  take(value, member(group, name));
}

std::vector<std::string> texts_of(const SavedValue& list) {
  std::vector<std::string> texts;
  for (const auto& item : list.get<List>()) texts.push_back(item.get<std::string>());
  return texts;
}

// --- writing -------------------------------------------------------------------------------------------------------

// Of a parameter that was never stepped, nothing.
template <class ParamState>
Dict state_of_torchs(const Optimizer& optimizer, const at::Tensor& parameter) {
  Dict values;
  const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  if (found == optimizer.state().end()) return values;
  visit_fields(static_cast<ParamState&>(*found->second), [&](const char* name, auto& value) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(value)>, int64_t>) {
      values.emplace(name, at::scalar_tensor(value, at::kFloat));
    } else if (value.defined()) {
      values.emplace(name, value);
    }
  });
  return values;
}

// The state of a flat optimizer, wherever it is.
class WholeState {
 public:
  WholeState(FlatState& state, comm::Communicator& workers, DividedTensors* divided)
      : state_(state), workers_(workers), divided_(divided) {
    for (auto* const parameter : state.parameters) positions_.emplace(parameter, positions_.size());
    if (!state.from_servers) {
      counts_ = state.flat.state().step_counts();
      return;
    }
    std::vector<size_t> which(num_states() + 2);
    std::iota(which.begin(), which.end() - 2, 0);
    which[num_states()] = StateEntry::kMaster;
    which.back() = FlatState::kSteps;
    on_servers_ = state.from_servers(which);
    for (const auto& count : on_servers_.back()) counts_.push_back(count.defined() ? count.item<float>() : 0);
  }

  // Whether it is stepped; one that a group was given since is not yet.
  bool has(const at::Tensor& parameter) const { return positions_.contains(parameter.unsafeGetTensorImpl()); }

  Dict of(const at::Tensor& tensor, bool counts_steps, bool begins_with_state) const {
    const auto parameter = positions_.at(tensor.unsafeGetTensorImpl());  // groups may have another order since
    const auto& entry = state_.flat.state().entry(parameter);
    // Not there where it was frozen when the servers took the others.
    const bool is_on_servers = state_.from_servers && on_servers_.back()[parameter].defined();
    Dict values;
    if (is_on_servers ? counts_[parameter] <= 0 && !(begins_with_state && entry.started) : !entry.started) {
      return values;
    }
    for (size_t which = 0; which <= num_states(); ++which) {
      const bool is_master = which == num_states();
      const auto tensor =
          is_on_servers ? on_servers_[which][parameter] : here(parameter, is_master ? StateEntry::kMaster : which);
      if (tensor.defined()) values.emplace(is_master ? kMaster : state_.flat.state().names()[which], tensor);
    }
    const float count =
        is_on_servers || !state_.from_servers ? counts_[parameter] : *entry.step.const_data_ptr<float>();
    if (counts_steps) values.emplace(kSteps, at::scalar_tensor(count, at::kFloat));
    return values;
  }

 private:
  size_t num_states() const { return state_.flat.state().names().size(); }

  at::Tensor here(size_t parameter, size_t which) const {
    const auto& state = state_.flat.state();
    if (divided_ != nullptr) {
      if (auto own = own_run(state, parameter, which)) return divided_->stand_in(std::move(*own));
    }
    return state.shard().size > 1 ? state.whole(parameter, which, workers_) : state.entry(parameter).current(which);
  }

  FlatState& state_;
  comm::Communicator& workers_;
  DividedTensors* const divided_;
  std::map<const void*, size_t> positions_;
  std::vector<std::vector<at::Tensor>> on_servers_;
  std::vector<float> counts_;
};

// --- reading -------------------------------------------------------------------------------------------------------

bool is_set(const SavedValue& value) { return value.holds<bool>() && value.get<bool>(); }

void check_other_option(const std::string& optimizer, const std::string& name, const SavedValue& value,
                        const std::string& what) {
  const bool decouples = name == "decoupled_weight_decay" && optimizer != "AdamW";
  if ((name != "maximize" && !decouples) || !is_set(value)) return;
  throw LayoutMismatch(what + " was saved with " + name + "=True, which " + optimizer +
                       " has not in C++; go on in Python, or save it without that option");
}

std::string name_at(const std::vector<std::string>& names, int64_t position) {
  if (position >= 0 && static_cast<size_t>(position) < names.size()) return names[static_cast<size_t>(position)];
  throw LayoutMismatch("the checkpoint has state of parameter " + std::to_string(position) +
                       " of an optimizer, which has " + std::to_string(names.size()) +
                       "; build the one that was saved");
}

}  // namespace

Dict with_names(const Dict& saved, const std::vector<std::string>& names) {
  List groups;
  for (const auto& group : member(saved, "groups").get<List>()) {
    auto options = group.get<Dict>();
    List parameters;
    for (const auto& parameter : member(options, "params").get<List>()) {
      const bool is_position = parameter.holds<int64_t>();
      parameters.push_back(is_position ? SavedValue(name_at(names, parameter.get<int64_t>())) : parameter);
    }
    options["params"] = std::move(parameters);
    groups.emplace_back(std::move(options));
  }
  const auto& values = member(saved, "state");
  Dict state;
  if (values.holds<SavedValue::Pairs>()) {
    for (const auto& [key, value] : values.get<SavedValue::Pairs>().items) {
      const auto* const position = std::get_if<int64_t>(&key);
      state.emplace(position != nullptr ? name_at(names, *position) : std::get<std::string>(key), value);
    }
  } else {
    state = values.get<Dict>();
  }
  return {{"name", member(saved, "name")}, {"groups", std::move(groups)}, {"state", std::move(state)}};
}

namespace {

// One element a parameter's, one a row, or one in all.
bool fits(const at::Tensor& state, const at::Tensor& parameter) {
  const int64_t rows = parameter.dim() > 0 ? parameter.size(0) : 1;
  return state.dim() == 0 || state.sizes() == parameter.sizes() || state.sizes() == at::IntArrayRef({rows, 1});
}

// The entries of torch.optim's state of one parameter, as this optimizer's. Null where there are none.
template <class ParamState>
std::unique_ptr<torch::optim::OptimizerParamState> param_state_of(const Dict& saved, const at::Tensor& parameter) {
  auto state = std::make_unique<ParamState>();
  bool has_any = false;
  visit_fields(*state, [&](const char* name, auto& value) {
    const auto found = saved.find(name);
    if (found == saved.end() || found->second.is_null()) return;
    has_any = true;
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(value)>, int64_t>) {
      value = static_cast<int64_t>(number_of(found->second));
    } else {
      value = found->second.get<at::Tensor>().to(parameter.device(), /*non_blocking=*/false, /*copy=*/true);
    }
  });
  return has_any ? std::move(state) : nullptr;
}

// By position, undefined where there is none.
std::vector<at::Tensor> masters_in(const Dict& saved, const std::vector<std::string>& names) {
  std::vector<at::Tensor> masters(names.size());
  for (size_t p = 0; p < names.size(); ++p) {
    const auto found = saved.find(names[p]);
    if (found == saved.end()) continue;
    const auto& values = found->second.get<Dict>();
    const auto master = values.find(kMaster);
    if (master != values.end()) masters[p] = master->second.get<at::Tensor>();
  }
  return masters;
}

}  // namespace

void compare_names(const std::vector<std::string>& ours, const std::vector<std::string>& saved,
                   const std::string& what) {
  const std::set<std::string> here(ours.begin(), ours.end());
  const std::set<std::string> there(saved.begin(), saved.end());
  for (const auto& name : ours) {
    if (there.contains(name)) continue;
    throw LayoutMismatch("the checkpoint lacks '" + name + "' of " + what + "; build the model that was saved");
  }
  for (const auto& name : saved) {
    if (here.contains(name)) continue;
    throw LayoutMismatch("the checkpoint has '" + name + "' in " + what +
                         ", which lacks it; build the model that was saved");
  }
}

int index_of(const ParameterRegistry& registry, const at::Tensor& parameter) {
  const int index = registry.find(parameter);
  if (index >= 0) return index;
  throw InvalidArgument("an optimizer has a parameter of shape " + c10::str(parameter.sizes()) +
                        " that is in no prepared module; prepare() the module, and build the optimizer from the "
                        "prepared module's parameters()");
}

std::vector<std::string> parameter_names(const Optimizer& optimizer, const ParameterRegistry& registry) {
  std::map<std::string, int> taken;
  std::vector<std::string> names;
  for (const auto& parameter : parameters_of(optimizer)) {
    auto name = registry.name(static_cast<size_t>(index_of(registry, parameter)));
    const int count = ++taken[name];
    if (count > 1) name += '#' + std::to_string(count);
    names.push_back(std::move(name));
  }
  return names;
}

Dict save_optimizer(Optimizer& optimizer, const std::vector<std::string>& names, const OtherOptions& others,
                    comm::Communicator& workers, DividedTensors* divided) {
  Dict result;
  const bool is_known = visit_torch_optimizer(optimizer, [&](auto known) {
    using Kind = decltype(known);
    constexpr bool kCountsSteps = !std::is_same_v<typename Kind::ParamState, torch::optim::SGDParamState>;
    constexpr bool kBeginsWithState = std::is_same_v<typename Kind::ParamState, torch::optim::AdagradParamState>;
    auto* const flat = flat_state_of(optimizer);
    std::optional<WholeState> whole;
    if (flat != nullptr && *flat) {
      follow_state(**flat, optimizer);
      whole.emplace(**flat, workers, divided);
    }
    List groups;
    Dict state;
    size_t position = 0;
    for (auto& group : optimizer.param_groups()) {
      auto options = groups.size() < others.size() ? others[groups.size()] : Dict();
      visit_fields(static_cast<typename Kind::Options&>(group.options()),
                   [&](const char* name, const auto& value) { options[name] = saved(value); });
      List own;
      for (const auto& parameter : group.params()) {
        own.emplace_back(names[position]);
        auto values = whole && whole->has(parameter) ? whole->of(parameter, kCountsSteps, kBeginsWithState)
                                                     : state_of_torchs<typename Kind::ParamState>(optimizer, parameter);
        if (!values.empty()) state.emplace(names[position], std::move(values));
        ++position;
      }
      options["params"] = std::move(own);
      groups.emplace_back(std::move(options));
    }
    result = {{"name", known.name}, {"groups", std::move(groups)}, {"state", std::move(state)}};
  });
  if (is_known) return result;
  throw InvalidArgument(
      "save() keeps the state of SGD, Adagrad, Adam, AdamW and RMSprop, and this is another optimizer; use one of "
      "those, or save this one's state with torch::save and name it in a file of your own");
}

void check_optimizer(const Optimizer& optimizer, const std::vector<std::string>& names, const Dict& given,
                     const std::string& what) {
  const auto saved = with_names(given, names);
  const auto& groups = member(saved, "groups").get<List>();
  std::map<std::string, at::Tensor> parameters;
  const auto tensors = parameters_of(optimizer);
  for (size_t p = 0; p < names.size(); ++p) parameters.emplace(names[p], tensors[p]);
  const bool is_known = visit_torch_optimizer(optimizer, [&](auto known) {
    const auto& name = member(saved, "name");  // null where it was made of a file that has none
    const std::string theirs = name.is_null() ? known.name : name.get<std::string>();
    if (known.name != theirs) {
      throw LayoutMismatch(what + " is " + known.name + ", and in the checkpoint " + theirs +
                           "; build that one to go on");
    }
    if (optimizer.param_groups().size() != groups.size()) {
      throw LayoutMismatch(what + " has " + std::to_string(optimizer.param_groups().size()) +
                           " groups, and in the checkpoint " + std::to_string(groups.size()));
    }
    auto next = names.begin();
    for (size_t g = 0; g < groups.size(); ++g) {
      const auto& group = groups[g].get<Dict>();
      const auto count = static_cast<std::ptrdiff_t>(optimizer.param_groups()[g].params().size());
      compare_names(std::vector<std::string>(next, next + count), texts_of(member(group, "params")),
                    "group " + std::to_string(g) + " of " + what);
      next += count;
      for (const auto& [option, value] : group) check_other_option(theirs, option, value, what);
      using Options = typename decltype(known)::Options;
      Options options(static_cast<const Options&>(optimizer.param_groups()[g].options()));
      visit_fields(options, [&](const char* name, auto& value) { take_option(group, name, value); });
    }
    std::set<std::string> kept{kMaster};
    typename decltype(known)::ParamState fields;
    visit_fields(fields, [&](const char* name, auto&) { kept.insert(name); });
    for (const auto& [parameter, values] : member(saved, "state").get<Dict>()) {
      for (const auto& [name, value] : values.template get<Dict>()) {
        const auto found = parameters.find(parameter);
        if (value.template holds<at::Tensor>() && found != parameters.end() &&
            !fits(value.template get<at::Tensor>(), found->second)) {
          throw LayoutMismatch("'" + name + "' of '" + parameter + "' in " + what + " has shape " +
                               c10::str(value.template get<at::Tensor>().sizes()) + ", and the parameter " +
                               c10::str(found->second.sizes()) + "; build the model that was saved");
        }
        if (kept.contains(name) || value.is_null()) continue;
        throw LayoutMismatch("the state of '" + parameter + "' in " + what + " has '" + name + "', which " + theirs +
                             " has not in C++; go on in Python");
      }
    }
  });
  if (!is_known) {
    throw LayoutMismatch(what +
                         " is an optimizer that a checkpoint does not hold; use SGD, Adagrad, Adam, AdamW or "
                         "RMSprop");
  }
}

OtherOptions load_optimizer(Optimizer& optimizer, const std::vector<std::string>& names, const Dict& saved) {
  OtherOptions others;
  const auto& groups = member(saved, "groups").get<List>();
  const auto& state = member(saved, "state").get<Dict>();
  visit_torch_optimizer(optimizer, [&](auto known) {
    using Kind = decltype(known);
    optimizer.state().clear();
    size_t position = 0;
    for (auto& group : optimizer.param_groups()) {
      auto& rest = others.emplace_back(groups.at(others.size()).get<Dict>());
      rest.erase("params");
      visit_fields(static_cast<typename Kind::Options&>(group.options()), [&](const char* name, auto& value) {
        take_option(rest, name, value);
        rest.erase(name);
      });
      for (const auto& parameter : group.params()) {
        const auto found = state.find(names[position++]);
        if (found == state.end()) continue;
        auto values = param_state_of<typename Kind::ParamState>(found->second.get<Dict>(), parameter);
        if (values) optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(values);
      }
    }
  });
  if (auto* const flat = flat_state_of(optimizer)) {
    follow_state(**flat, optimizer);
    set_masters(**flat, optimizer, masters_in(state, names));
  }
  return others;
}

}  // namespace muster::detail
