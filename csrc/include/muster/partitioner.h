// How many shards the rows of a tensor are divided into: the partitioners of tf.distribute.experimental.partitioners.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace muster {

// Each is called with the sizes and the dtype of a tensor and gives the number of rows (of dimension 0) of every shard:
// they differ by at most one, and the first shards take the extra row (10 rows in 4 shards: 3, 3, 2, 2). No shard is
// empty, but the one of a tensor without rows. Values. Each throws InvalidArgument for a tensor without dimensions, of
// negative sizes or of more bytes a row than can be counted, and where it is made, for a number that is not positive.

/// So many shards, or one a row where there are fewer rows.
class FixedShards {
 public:
  /// Throws InvalidArgument for a number that is not positive.
  explicit FixedShards(int64_t num_shards);
  /// Rows of every shard of a tensor of `sizes` and `dtype`.
  std::vector<int64_t> operator()(at::IntArrayRef sizes, at::ScalarType dtype) const;

 private:
  int64_t num_shards_;
};

/// As many shards of about `min_shard_bytes` as there are, at most `max_shards`: total bytes / min_shard_bytes, rounded
/// up as in TensorFlow, so that a shard may be smaller by what the rounding takes.
class MinSize {
 public:
  /// Throws InvalidArgument for a number that is not positive.
  explicit MinSize(int64_t min_shard_bytes = 256 << 10, int64_t max_shards = 1);
  /// Rows of every shard of a tensor of `sizes` and `dtype`.
  std::vector<int64_t> operator()(at::IntArrayRef sizes, at::ScalarType dtype) const;

 private:
  int64_t min_shard_bytes_;
  int64_t max_shards_;
};

/// As few shards of at most `max_shard_bytes` as will do; larger ones where there would be more than `max_shards`, or
/// where one row is larger.
class MaxSize {
 public:
  /// Throws InvalidArgument for a number that is not positive.
  explicit MaxSize(int64_t max_shard_bytes, std::optional<int64_t> max_shards = std::nullopt);
  /// Rows of every shard of a tensor of `sizes` and `dtype`.
  std::vector<int64_t> operator()(at::IntArrayRef sizes, at::ScalarType dtype) const;

 private:
  int64_t max_shard_bytes_;
  std::optional<int64_t> max_shards_;
};

}  // namespace muster
