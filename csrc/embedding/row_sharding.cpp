#include "embedding/row_sharding.h"

#include <string>

#include "muster/error.h"

namespace muster {

RowSharding::RowSharding(RowPlacement placement, int64_t num_rows, int num_servers)
    : placement_(placement), num_servers_(num_servers) {
  if (num_rows < 0 || num_servers < 1) {
    throw InvalidArgument(std::to_string(num_rows) + " rows cannot be placed on " + std::to_string(num_servers) +
                          " servers; give at least one server, and no negative number of rows");
  }
  rows_ = num_rows / num_servers;
  extra_ = num_rows % num_servers;
}

}  // namespace muster
