// Errors that know what became of the parameters.
#pragma once

#include <utility>

#include "muster/parameters_after.h"

namespace muster {

/// Beside the type that is caught.
class KnowsParameters {
 public:
  explicit KnowsParameters(Parameters parameters) noexcept : parameters_(parameters) {}
  virtual ~KnowsParameters() = default;
  Parameters parameters() const noexcept { return parameters_; }

 private:
  Parameters parameters_;
};

/// An `E` that parameters_after() tells from others.
template <class E>
class WithParameters : public E, public KnowsParameters {
 public:
  template <class... Arguments>
  explicit WithParameters(Parameters parameters, Arguments&&... arguments)
      : E(std::forward<Arguments>(arguments)...), KnowsParameters(parameters) {}
};

}  // namespace muster
