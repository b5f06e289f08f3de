// Embeddings, as bindings of several rooms need them.
#pragma once

#include <cstdint>
#include <string>

#include "embedding/row_initialiser.h"

namespace muster {

/// `kind`: "normal" or "uniform".
RowInitialiser row_initialiser(const std::string& kind, double scale, uint64_t seed);

}  // namespace muster
