#include "muster/loss_scaler.h"

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "core/plain_memory.h"
#include "kernels/kernels.h"
#include "muster/error.h"
#include "optimizer/gradient_norm.h"

namespace muster {

namespace {

void require(bool holds, const char* field, double value, const char* requirement) {
  if (!holds)
    throw InvalidArgument("LossScale " + std::string(field) + "=" + std::to_string(value) + ": it must be " +
                          requirement);
}

// Kernels and update() have it as a float.
bool is_scale(double value) {
  const auto scale = static_cast<float>(value);
  return scale > 0 && std::isfinite(scale);
}

bool all_finite_and_unscaled(std::vector<at::Tensor>& gradients, double scale) {
  // The operator takes tensors of one device and dtype.
  std::map<std::pair<c10::DeviceIndex, at::ScalarType>, std::vector<at::Tensor>> alike;
  for (auto& gradient : gradients) alike[{gradient.device().index(), gradient.scalar_type()}].push_back(gradient);
  bool finite = true;
  for (auto& [key, tensors] : alike) {
    const auto options = tensors.front().options().dtype(at::kFloat);
    auto found = at::zeros({1}, options);
    at::_amp_foreach_non_finite_check_and_unscale_(tensors, found, at::full({1}, 1 / scale, options));
    finite = finite && found.item<float>() == 0;
  }
  return finite;
}

}  // namespace

void LossScale::validate() const {
  require(is_scale(init), "init", init, "positive and finite as a float");
  require(growth > 1 && std::isfinite(growth), "growth", growth, "above 1");
  require(backoff > 0 && backoff < 1, "backoff", backoff, "between 0 and 1");
  require(interval >= 1, "interval", interval, "at least 1");
}

LossScaler::LossScaler(const LossScale& options) : options_(options), state_{options.init, 0} { options_.validate(); }

at::Tensor LossScaler::scale(const at::Tensor& loss) { return loss.mul(state_.scale); }

void LossScaler::unscale(torch::optim::Optimizer& optimizer) {
  if (progress_.contains(&optimizer)) {
    throw InvalidArgument("unscale() was called twice for one optimizer, or after its step(); call update() first");
  }
  std::vector<at::Tensor> gradients;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      auto& gradient = parameter.mutable_grad();
      if (!gradient.defined()) continue;
      if (is_lazy(gradient)) gradient = in_plain_memory(gradient);
      if (gradient.scalar_type() == at::kHalf) {
        throw InvalidArgument(
            "a gradient is fp16: dividing it by the scale would lose it; keep parameters in fp32 and use Autocast");
      }
      gradients.push_back(dense_values(gradient));
    }
  }
  progress_[&optimizer].finite = all_finite_and_unscaled(gradients, state_.scale);
}

bool LossScaler::step(torch::optim::Optimizer& optimizer) {
  if (!progress_.contains(&optimizer)) unscale(optimizer);
  auto& progress = progress_[&optimizer];
  if (progress.stepped)
    throw InvalidArgument("step() was called twice for one optimizer; call update() after each iteration");
  progress.stepped = true;
  if (progress.finite) {
    optimizer.step();
    Autocast::clear_cache();
  }
  return progress.finite;
}

void LossScaler::update() {
  if (progress_.empty())
    throw InvalidArgument(
        "update() without a step() or unscale() before it; call it once at the end of each iteration");
  bool finite = true;
  for (const auto& [optimizer, progress] : progress_) finite = finite && progress.finite;
  kernels::LossScaleState state{static_cast<float>(state_.scale), state_.growth_tracker};
  kernels::loss_scale_update(&state, finite, options_.growth, options_.backoff, options_.interval);
  state_ = {state.scale, state.growth_tracker};
  progress_.clear();
}

void LossScaler::load_state(const LossScalerState& state) {
  if (!is_scale(state.scale) || state.growth_tracker < 0) {
    throw InvalidArgument("a loss scale of " + std::to_string(state.scale) + " with growth tracker " +
                          std::to_string(state.growth_tracker) +
                          "; the scale is positive and finite as a float, the tracker not negative");
  }
  state_ = state;
}

}  // namespace muster
