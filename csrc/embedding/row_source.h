// Rows of an embedding that are not in its weight.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>

namespace muster {

/// Where the rows are. Thread-safe among the replicas of a step.
class RowSource {
 public:
  virtual ~RowSource() = default;
  /// Values of `rows` (1-dim int64), fp32 [rows.numel(), dim].
  virtual at::Tensor pull(const at::Tensor& rows) = 0;
  /// All rows.
  virtual at::Tensor whole() = 0;
};

/// Stands for rows that are elsewhere: fp32 [num_rows, dim] of NaN, in the memory of one value.
at::Tensor make_row_stub(int64_t num_rows, int64_t dim);
bool is_row_stub(const at::Tensor& weight);

/// Says where a stub's rows are, for as long as `source` lives. Thread-safe, as is what follows.
void set_row_source(const at::Tensor& stub, const std::shared_ptr<RowSource>& source);

/// Null for a weight that has its rows. Throws InvalidArgument for a stub whose rows nobody has (yet, or any more).
std::shared_ptr<RowSource> row_source_of(const at::Tensor& weight);

/// The rows that ids name, and the ids as places among them.
struct PulledRows {
  at::Tensor rows;  ///< [distinct ids, dim], ascending; its gradient goes to the weight's, as sparse rows
  at::Tensor ids;   ///< int64, of the ids' shape
};

/// None for a weight that has its rows. `ids`: int64 or int32, of any shape. Throws as row_source_of, and what its
/// source throws.
std::optional<PulledRows> pull_rows(const at::Tensor& weight, const at::Tensor& ids);

/// The weight, or a copy of all rows where they are elsewhere. Throws as row_source_of.
at::Tensor whole_rows(const at::Tensor& weight);

}  // namespace muster
