#include "strategy/saved_dtypes.h"

#include <map>
#include <utility>

#include "optimizer/flat_state.h"
#include "optimizer/masters.h"
#include "optimizer/optimizer_state.h"
#include "strategy/saved_optimizer.h"

namespace muster::detail {

namespace {

using Dict = SavedValue::Dict;

}  // namespace

void follow_dtypes(const std::vector<const torch::nn::Module*>& modules, std::vector<Dict>& saved_modules,
                   std::vector<OptimizerToLoad>& optimizers) {
  struct Saved {
    at::Tensor values;
    std::vector<SavedValue*> places;  // it may have several names
    bool is_widened = false;          // by the first optimizer that has it
  };
  std::map<const void*, Saved> saved_values;  // by parameter
  for (size_t i = 0; i < modules.size(); ++i) {
    for (const auto& parameter : modules[i]->named_parameters()) {
      const auto found = saved_modules[i].find(parameter.key());  // rows of a table are elsewhere
      if (found == saved_modules[i].end()) continue;
      auto& saved = saved_values[parameter.value().unsafeGetTensorImpl()];
      saved.values = found->second.get<at::Tensor>();
      saved.places.push_back(&found->second);
    }
  }
  for (auto& [optimizer, names, saved] : optimizers) {
    auto state = saved.at("state").get<Dict>();
    const auto parameters = parameters_of(optimizer);
    for (size_t p = 0; p < parameters.size(); ++p) {
      const auto dtype = parameters[p].scalar_type();
      const auto found = saved_values.find(parameters[p].unsafeGetTensorImpl());
      if (found == saved_values.end() || found->second.values.scalar_type() == dtype) continue;
      auto& [theirs, places, is_widened] = found->second;
      auto own = state.contains(names[p]) ? state.at(names[p]).get<Dict>() : Dict();
      const auto master = own.find(kMaster);
      const auto widest = master == own.end() ? theirs : current_master(master->second.get<at::Tensor>(), theirs);
      if (!std::exchange(is_widened, true)) {
        for (auto* const place : places) *place = widest;
      }
      if (!has_master(dtype) || has_master(widest.scalar_type())) continue;
      if (!state.contains(names[p]) && !may_have_master_alone(optimizer)) continue;
      own.insert_or_assign(kMaster, widest);
      state.insert_or_assign(names[p], std::move(own));
    }
    saved.insert_or_assign("state", std::move(state));
  }
}

}  // namespace muster::detail
