#include "optimizer/masters.h"

#include <torch/optim/sgd.h>

#include <algorithm>
#include <string>

namespace muster::detail {

namespace {

constexpr const char* kMasters = "masters";  // in an archive, by position

}  // namespace

std::vector<at::Tensor> masters_of(const FlatState& state, const std::vector<c10::TensorImpl*>& parameters) {
  std::vector<at::Tensor> found(parameters.size());
  std::vector<size_t> low;  // of low precision
  for (size_t p = 0; p < state.parameters.size(); ++p) {
    if (has_master(state.flat.state().entry(p).dtype)) low.push_back(p);
  }
  if (low.empty()) return found;
  std::vector<at::Tensor> on_servers;
  if (state.from_servers) on_servers = state.from_servers({StateEntry::kMaster}).front();
  for (const size_t p : low) {
    const auto place = std::ranges::find(parameters, state.parameters[p]);
    if (place == parameters.end()) continue;
    const auto& entry = state.flat.state().entry(p);
    auto& master = found[static_cast<size_t>(place - parameters.begin())];
    if (state.from_servers && on_servers[p].defined()) {
      master = on_servers[p];
    } else if (entry.started) {
      master = entry.current(StateEntry::kMaster);
    }
  }
  return found;
}

void write_masters(torch::serialize::OutputArchive& archive, const std::vector<at::Tensor>& masters) {
  torch::serialize::OutputArchive values(archive.compilation_unit());
  bool has_any = false;
  for (size_t p = 0; p < masters.size(); ++p) {
    if (!masters[p].defined()) continue;
    values.write(std::to_string(p), masters[p], /*is_buffer=*/true);
    has_any = true;
  }
  if (has_any) archive.write(kMasters, values);
}

std::vector<at::Tensor> read_masters(torch::serialize::InputArchive& archive, size_t num_parameters) {
  torch::serialize::InputArchive values;
  if (!archive.try_read(kMasters, values)) return {};
  std::vector<at::Tensor> masters(num_parameters);
  for (size_t p = 0; p < num_parameters; ++p) {
    at::Tensor master;
    if (values.try_read(std::to_string(p), master, /*is_buffer=*/true)) masters[p] = master;
  }
  return masters;
}

bool may_have_master_alone(const torch::optim::Optimizer& optimizer) {
  return dynamic_cast<const torch::optim::SGD*>(&optimizer) != nullptr;
}

void set_masters(FlatState& state, const torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& masters) {
  auto& own = state.flat.state();
  const bool may_be_alone = may_have_master_alone(optimizer);
  for (size_t p = 0; p < std::min(masters.size(), state.parameters.size()); ++p) {
    if (!masters[p].defined()) continue;
    own.set_master(p, masters[p]);
    if (may_be_alone && !own.entry(p).started) own.set_step_count(p, 0);
  }
}

}  // namespace muster::detail
