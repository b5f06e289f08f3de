// The division of a sparse embedding's rows over servers.
#pragma once

#include <cstdint>

#include "muster/row_placement.h"

namespace muster {

/// A value. Thread-safe.
class RowSharding {
 public:
  /// Throws InvalidArgument unless there are servers, and no less than 0 rows.
  RowSharding(RowPlacement placement, int64_t num_rows, int num_servers);

  /// `row` in [0, num_rows).
  int server_of(int64_t row) const noexcept {
    if (placement_ == RowPlacement::modulo) return static_cast<int>(row % num_servers_);
    const int64_t first_small = extra_ * (rows_ + 1);
    return static_cast<int>(row < first_small ? row / (rows_ + 1) : extra_ + (row - first_small) / rows_);
  }

  int64_t num_rows_of(int server) const noexcept { return rows_ + (server < extra_ ? 1 : 0); }

 private:
  RowPlacement placement_;
  int64_t num_servers_;
  int64_t rows_;   // of a server without an extra row
  int64_t extra_;  // servers that have one
};

}  // namespace muster
