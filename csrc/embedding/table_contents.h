// The rows of a table that are no longer what its initialiser gives.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace muster {

/// A value, but for the tensors' memory. Rows that are not there have the initialiser's values and no state.
struct TableContents {
  at::Tensor rows;     ///< int64 [n], ascending
  at::Tensor values;   ///< fp32 [n, dim]
  at::Tensor states;   ///< fp32 [n, RowTable::state_width]: the optimizer's, one kind beside the other
  uint64_t steps = 0;  ///< that the optimizer counts, of all rows
};

/// Whether `rows` are int64 [n], contiguous, ascending and of a table of so many rows.
bool are_rows_of(const at::Tensor& rows, int64_t num_rows);
/// Whether `values` are fp32 [n, anything], contiguous, one row for each of `rows`.
bool are_of_rows(const at::Tensor& values, const at::Tensor& rows);

}  // namespace muster
