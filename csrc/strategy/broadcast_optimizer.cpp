#include <iomanip>
#include <ios>
#include <type_traits>

#include "comm/text_exchange.h"
#include "core/lines.h"
#include "core/plain_text.h"
#include "muster/error.h"
#include "optimizer/flat_state.h"
#include "strategy/collectives.h"
#include "strategy/strategy_state.h"
#include "strategy/torch_optimizers.h"

namespace muster::detail {

namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamState;

// A state's tensors, defined or not, and its step count if it has one.
struct Fields {
  std::vector<at::Tensor*> tensors;
  int64_t* step = nullptr;
};

template <class State>
Fields fields_of(OptimizerParamState& state) {
  Fields fields;
  visit_fields(static_cast<State&>(state), [&](const char*, auto& value) {
    if constexpr (std::is_same_v<std::remove_reference_t<decltype(value)>, int64_t>) {
      fields.step = &value;
    } else {
      fields.tensors.push_back(&value);
    }
  });
  return fields;
}

struct StateKind {
  std::unique_ptr<OptimizerParamState> (*make)() = nullptr;
  Fields (*fields)(OptimizerParamState&) = nullptr;
};

StateKind kind_of(const Optimizer& optimizer) {
  StateKind kind;
  visit_torch_optimizer(optimizer, [&](auto known) {
    using State = typename decltype(known)::ParamState;
    kind = {[]() -> std::unique_ptr<OptimizerParamState> { return std::make_unique<State>(); }, fields_of<State>};
  });
  return kind;
}

// A line for each parameter, in the order of the groups.
std::string layout_of(const Optimizer& optimizer, const ParameterRegistry& registry) {
  TextWriter out;
  size_t number = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const int index = registry.find(parameter);
      if (index >= 0) out << "'" << registry.name(static_cast<size_t>(index)) << "' ";
      out << parameter.sizes() << " in group " << number << '\n';
    }
    ++number;
  }
  return out.str();
}

void compare_layouts(const std::vector<std::string>& layouts) {
  for (size_t r = 1; r < layouts.size(); ++r) {
    const auto difference = first_difference(layouts[0], layouts[r]);
    if (!difference) continue;
    throw LayoutMismatch("the optimizers of the ranks differ: parameter " + std::to_string(difference->number) +
                         " is " + difference->first + " on rank 0, and " + difference->second + " on rank " +
                         std::to_string(r) +
                         "; build the same optimizer on every rank, over the parameters in the same order");
  }
}

// Learning rates by group, then for each parameter: whether it has a state, its step, and which tensors are defined.
std::string description_of(Optimizer& optimizer, const StateKind& kind, Leaves& tensors) {
  TextWriter out;
  for (const auto& group : optimizer.param_groups()) {
    out << exact_text(group.options().get_lr()) << '\n';
    for (const auto& parameter : group.params()) {
      const auto state = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (state == optimizer.state().end()) {
        out << "0\n";
        continue;
      }
      const auto fields = kind.fields(*state->second);
      out << "1 " << (fields.step != nullptr ? *fields.step : 0);
      for (const auto* tensor : fields.tensors) {
        out << ' ' << tensor->defined();
        if (tensor->defined()) tensors.push_back(*tensor);
      }
      out << '\n';
    }
  }
  return out.str();
}

void take_over(Optimizer& optimizer, const StateKind& kind, const std::string& description, const Leaves& tensors) {
  TextReader in(description);
  std::string line;
  auto next = tensors.begin();
  optimizer.state().clear();
  std::getline(in, line);
  std::vector<at::Tensor> masters;
  for (const char has_master : line) masters.push_back(has_master == '1' ? *next++ : at::Tensor());
  leave_masters(optimizer, masters);
  for (auto& group : optimizer.param_groups()) {
    std::getline(in, line);
    std::string_view lr(line);
    group.options().set_lr(take_number(lr));
    for (const auto& parameter : group.params()) {
      std::getline(in, line);
      TextReader fields_in(line);
      bool has_state = false;
      fields_in >> has_state;
      if (!has_state) continue;
      auto state = kind.make();
      const auto fields = kind.fields(*state);
      int64_t step = 0;
      fields_in >> step;
      if (fields.step != nullptr) *fields.step = step;
      for (auto* tensor : fields.tensors) {
        bool defined = false;
        fields_in >> defined;
        if (defined) *tensor = (next++)->to(parameter.device());
      }
      optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
    }
  }
}

}  // namespace

std::vector<std::string> learning_rates_of(const Optimizer& optimizer) {
  std::vector<std::string> lines;
  for (const auto& group : optimizer.param_groups()) {
    TextWriter line;
    try {
      line << "lr " << std::setprecision(17) << group.options().get_lr() << " in group " << lines.size();
    } catch (const c10::Error&) {
      return {};
    }
    lines.push_back(line.str());
  }
  return lines;
}

void broadcast_optimizer(Optimizer& optimizer, const ParameterRegistry& registry, comm::Communicator& workers) {
  if (workers.size() == 1) return;
  const auto kind = kind_of(optimizer);
  const bool is_chief = workers.rank() == 0;
  compare_layouts(exchange_texts(workers, layout_of(optimizer, registry)));
  Leaves tensors;
  std::string mine;
  if (is_chief) {
    if (kind.make != nullptr) {
      for (const auto& master : masters_in(optimizer)) {
        mine += master.defined() ? '1' : '0';
        if (master.defined()) tensors.push_back(master);
      }
      mine += '\n' + description_of(optimizer, kind, tensors);
    } else {
      mine = optimizer.state().empty() ? "new" : "unknown";
    }
  }
  const auto description = exchange_texts(workers, mine).front();
  if (description == "new") return;
  if (description == "unknown" || kind.make == nullptr) {
    throw InvalidArgument(
        "the chief's optimizer has state of a kind that cannot be sent to other workers; use SGD, "
        "Adagrad, Adam, AdamW or RMSprop of torch::optim, or prepare it before its first step");
  }
  tensors = send_over_workers(workers, tensors, 0);
  if (!is_chief) take_over(optimizer, kind, description, tensors);
}

}  // namespace muster::detail
