// `.grad` of parameters that take no part in a call.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "window/parameter_registry.h"

namespace muster {

/// Backward writes `.grad` of parameters that take no part, too: they get back what they had.
class UntouchedGradients {
 public:
  UntouchedGradients(const ParameterRegistry& registry, size_t replicas, const std::vector<size_t>& parameters) {
    for (size_t p : parameters) {
      for (size_t r = 0; r < replicas; ++r) {
        const auto& parameter = registry.parameter(r, p);
        kept_.emplace_back(parameter, std::exchange(parameter.mutable_grad(), at::Tensor()));
      }
    }
  }
  ~UntouchedGradients() {
    for (auto& [parameter, gradient] : kept_) parameter.mutable_grad() = std::move(gradient);
  }
  UntouchedGradients(const UntouchedGradients&) = delete;
  UntouchedGradients& operator=(const UntouchedGradients&) = delete;

  /// Forgets the saved gradients instead of restoring them: an interrupted backward may still write `.grad`.
  void abandon() noexcept { kept_.clear(); }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> kept_;
};

}  // namespace muster
