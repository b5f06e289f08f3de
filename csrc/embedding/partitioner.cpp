#include "muster/partitioner.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <string>

#include "muster/error.h"

namespace muster {

namespace {

int64_t positive(const char* name, int64_t value) {
  if (value < 1) throw InvalidArgument(std::string(name) + "=" + std::to_string(value) + " must be positive");
  return value;
}

struct Rows {
  int64_t count = 0;
  int64_t bytes = 0;  // of each
};

Rows rows_of(at::IntArrayRef sizes, at::ScalarType dtype) {
  Rows rows{sizes.empty() ? -1 : sizes[0], static_cast<int64_t>(c10::elementSize(dtype))};
  bool is_countable = rows.count >= 0;
  for (size_t d = 1; d < sizes.size() && is_countable; ++d) {
    is_countable = sizes[d] >= 0 && !__builtin_mul_overflow(rows.bytes, sizes[d], &rows.bytes);
  }
  if (is_countable) return rows;
  throw InvalidArgument("a tensor of shape " + c10::str(sizes) + " cannot be divided by rows; give its sizes");
}

int64_t divide_up(int64_t value, int64_t by) { return value / by + (value % by != 0 ? 1 : 0); }

std::vector<int64_t> divided(int64_t rows, int64_t shards) {
  shards = std::max<int64_t>(std::min(shards, rows), 1);
  std::vector<int64_t> sizes(static_cast<size_t>(shards), rows / shards);
  std::for_each_n(sizes.begin(), rows % shards, [](int64_t& size) { ++size; });
  return sizes;
}

}  // namespace

FixedShards::FixedShards(int64_t num_shards) : num_shards_(positive("num_shards", num_shards)) {}

std::vector<int64_t> FixedShards::operator()(at::IntArrayRef sizes, at::ScalarType dtype) const {
  return divided(rows_of(sizes, dtype).count, num_shards_);
}

MinSize::MinSize(int64_t min_shard_bytes, int64_t max_shards)
    : min_shard_bytes_(positive("min_shard_bytes", min_shard_bytes)), max_shards_(positive("max_shards", max_shards)) {}

std::vector<int64_t> MinSize::operator()(at::IntArrayRef sizes, at::ScalarType dtype) const {
  const auto [rows, row_bytes] = rows_of(sizes, dtype);
  int64_t bytes = 0;
  if (__builtin_mul_overflow(rows, row_bytes, &bytes)) return divided(rows, max_shards_);
  return divided(rows, std::min(divide_up(bytes, min_shard_bytes_), max_shards_));
}

MaxSize::MaxSize(int64_t max_shard_bytes, std::optional<int64_t> max_shards)
    : max_shard_bytes_(positive("max_shard_bytes", max_shard_bytes)), max_shards_(max_shards) {
  if (max_shards) positive("max_shards", *max_shards);
}

std::vector<int64_t> MaxSize::operator()(at::IntArrayRef sizes, at::ScalarType dtype) const {
  const auto [rows, row_bytes] = rows_of(sizes, dtype);
  const int64_t rows_a_shard = row_bytes == 0 ? rows : max_shard_bytes_ / row_bytes;
  const int64_t shards = divide_up(rows, std::max<int64_t>(rows_a_shard, 1));
  return divided(rows, std::min(shards, max_shards_.value_or(shards)));
}

}  // namespace muster
