#include "strategy/saved_dtypes.h"

#include <map>
#include <utility>

#include "strategy/saved_optimizer.h"
#include "strategy/saved_parts.h"

namespace muster::detail {

namespace {

using Dict = SavedValue::Dict;

bool is_low(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

}  // namespace

void follow_dtypes(const std::vector<const torch::nn::Module*>& modules, std::vector<Dict>& saved_modules,
                   std::vector<OptimizerToLoad>& optimizers) {
  std::map<const void*, std::vector<SavedValue*>> saved_values;  // by parameter, which may have several names
  for (size_t i = 0; i < modules.size(); ++i) {
    for (const auto& parameter : modules[i]->named_parameters()) {
      const auto found = saved_modules[i].find(parameter.key());  // rows of a table are elsewhere
      if (found != saved_modules[i].end()) {
        saved_values[parameter.value().unsafeGetTensorImpl()].push_back(&found->second);
      }
    }
  }
  for (auto& [optimizer, names, saved] : optimizers) {
    auto state = saved.at("state").get<Dict>();
    size_t position = 0;
    for (const auto& group : optimizer.param_groups()) {
      for (const auto& parameter : group.params()) {
        const auto found = state.find(names[position++]);
        const auto values = saved_values.find(parameter.unsafeGetTensorImpl());
        if (found == state.end() || values == saved_values.end()) continue;
        const auto theirs = values->second.front()->get<at::Tensor>();
        if (theirs.scalar_type() == parameter.scalar_type()) continue;
        auto own = found->second.get<Dict>();
        const auto master = own.find(kMaster);
        const auto widest = master == own.end() ? theirs : master->second.get<at::Tensor>();
        for (auto* const value : values->second) *value = widest;
        if (!is_low(parameter.scalar_type()) || is_low(widest.scalar_type())) continue;
        own.insert_or_assign(kMaster, widest);
        found->second = std::move(own);
      }
    }
    saved.insert_or_assign("state", std::move(state));
  }
}

}  // namespace muster::detail
