// Rows of a table by ascending numbers: those of a server's cut, and those that several servers wrote into files.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "net/unix_socket.h"
#include "server/shard/shard.h"

namespace muster::server {

/// Rows of a table, or a part of them. A value.
struct RowBlock {
  at::Tensor rows;    ///< int64 [n]
  at::Tensor values;  ///< fp32 [n, dim]
  at::Tensor states;  ///< fp32 [n, width]

  static RowBlock empty(int64_t count, int64_t dim, int64_t width);
  int64_t count() const { return rows.numel(); }
};

/// Owned by one thread.
class OrderedRows {
 public:
  OrderedRows() = default;
  virtual ~OrderedRows() = default;
  OrderedRows(const OrderedRows&) = delete;
  OrderedRows& operator=(const OrderedRows&) = delete;

  virtual uint64_t total() const = 0;  ///< rows of the table, of all servers
  virtual uint64_t begin() const = 0;  ///< how many of them come before the first one of these
  virtual uint64_t count() const = 0;  ///< of these
  /// The next rows, `most` or at the end fewer; none after the last.
  virtual RowBlock next(int64_t most) = 0;
};

/// Those of a table's cuts (HeldTable::begin_cut), `rows_of[i]` of stripe i, which this shard has alone. 8 bytes a row
/// of memory. The shard and the cuts outlive it.
std::unique_ptr<OrderedRows> rows_of_cut(const Shard& shard, uint32_t table, const std::vector<uint64_t>& rows_of);

/// Writes rows into a file that did not exist, as records: number, values, states. It is there once all are. Throws
/// CheckpointError where the system refuses.
void write_rows(const std::filesystem::path& path, OrderedRows& rows, int64_t at_once,
                const std::function<void()>& check);

/// A part of the rows of files that write_rows made, `files[i]` by server i: about as many for each of `files.size()`
/// parts, in their order. Rows have `dim` values and `width` floats of state. Throws CheckpointError where the system
/// refuses, or a file is cut short.
std::unique_ptr<OrderedRows> merge_rows(const std::vector<std::filesystem::path>& files, size_t part, int64_t dim,
                                        int64_t width);

}  // namespace muster::server
