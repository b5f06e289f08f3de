// Which parameter server has which row of an embedding.
#pragma once

#include <cstdint>

namespace muster {

enum class RowPlacement : uint8_t {
  modulo,  ///< row % servers: spreads rows that are touched often, wherever they are
  range    ///< contiguous; the first servers take the extra row
};

}  // namespace muster
