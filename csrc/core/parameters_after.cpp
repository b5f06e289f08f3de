#include "muster/parameters_after.h"

#include "core/with_parameters.h"

namespace muster {

Parameters parameters_after(const CommError& error) noexcept {
  const auto* const known = dynamic_cast<const KnowsParameters*>(&error);
  return known == nullptr ? Parameters::whole : known->parameters();
}

}  // namespace muster
