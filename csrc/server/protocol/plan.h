// What the servers of a job hold: given by the chief, equal everywhere, so that every process cuts the parameters into
// the same chunks.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "core/flat_layout.h"
#include "core/ownership.h"
#include "embedding/row_initialiser.h"
#include "embedding/row_sharding.h"
#include "embedding/row_stripes.h"
#include "embedding/row_table.h"
#include "optimizer/flat_groups.h"

namespace muster::server {

inline constexpr size_t kMaxParameters = size_t{1} << 20;
inline constexpr size_t kMaxNameBytes = 4096;
inline constexpr size_t kMaxDims = 64;
inline constexpr size_t kMaxGroups = 4096;
inline constexpr size_t kMaxTables = 4096;
inline constexpr int64_t kMaxRows = int64_t{1} << 48;
inline constexpr int64_t kMaxRowDim = int64_t{1} << 19;  ///< a row travels whole, with its optimizer's state
inline constexpr int64_t kMaxChunks = int64_t{1} << 20;
inline constexpr uint32_t kMaxServers = 256;
inline constexpr uint32_t kMaxWorkers = 1024;
inline constexpr int kChief = 0;  ///< the rank that gives initial values
inline constexpr uint64_t kMinChunkBytes = uint64_t{32} << 10;
inline constexpr uint64_t kMaxChunkBytes = uint64_t{8} << 20;
inline constexpr uint32_t kAnyStaleness = 0xffffffff;

/// A sparse embedding whose rows are divided over all servers. A value.
struct TableSpec {
  std::string name;
  int64_t num_rows = 0;
  int64_t dim = 0;
  RowPlacement placement = RowPlacement::modulo;
  RowInitialiser initialiser = {};
  uint32_t group = 0;             ///< in Plan::groups: its optimizer and hyperparameters
  bool row_wise_adagrad = false;  ///< one accumulator a row, where that optimizer is Adagrad

  bool operator==(const TableSpec&) const = default;
};

/// A value.
struct Plan {
  std::vector<ParameterSpec> parameters;  ///< in registration order
  std::vector<uint32_t> group_of;         ///< by parameter
  std::vector<TableSpec> tables;          ///< at least one of these or of parameters
  FlatGroups groups;                      ///< the optimizer and its hyperparameters by group
  uint32_t servers = 1;
  uint32_t workers = 1;                      ///< that start the job
  uint32_t staleness = 0;                    ///< 0: synchronous; kAnyStaleness: asynchronous
  uint64_t chunk_bytes = uint64_t{2} << 20;  ///< of a chunk's gradients, at most
  uint32_t heartbeat_ms = 5'000;             ///< after so long without a sign of life a worker is dead
  uint32_t timeout_ms = 600'000;             ///< that a live worker may be late
  double norm_type = 2;                      ///< of the partials of sums; see kernels::grad_stats

  bool is_synchronous() const noexcept { return staleness == 0; }

  /// Throws InvalidArgument naming what is out of range: names that repeat, sizes that overflow, dtypes that no flat
  /// optimizer steps, groups that are missing, tables whose optimizer moves every row, bounds above.
  void validate() const;

  /// Throws InvalidArgument for a step's groups by which tables cannot be stepped: those of another kind of optimizer,
  /// with other state, or that move every row.
  void check_groups(const FlatGroups& groups) const;

  /// The first difference to another process's plan in words, or an empty string. Hyperparameters may differ.
  std::string describe_difference(const Plan& other) const;
};

/// A table's hyperparameters. Throws InvalidArgument where there is no such group, or it is not row-wise Adagrad's.
RowOptimizer row_optimizer_of(const TableSpec& table, const FlatGroups& groups);
/// The table with no row materialised.
RowTable empty_table(const TableSpec& table, const FlatGroups& groups);
/// Which server owns which row.
RowSharding sharding_of(const TableSpec& table, const Plan& plan);
/// Which stripe of its server a row is in.
RowStripes stripes_of(const TableSpec& table, const Plan& plan);

/// A run of one parameter within a chunk.
struct Piece {
  int parameter = 0;
  Run run;             ///< begins at a multiple of kernels::kTile
  int64_t offset = 0;  ///< of its first element in the chunk; a multiple of 64 bytes of gradients
};

/// What travels and is stepped at once: runs of neighbouring parameters in registration order, of one dtype. A value.
struct Chunk {
  int server = 0;
  c10::ScalarType dtype = c10::ScalarType::Float;     ///< of the parameters
  c10::ScalarType gradient = c10::ScalarType::Float;  ///< accumulation dtype
  std::vector<Piece> pieces;
  int64_t numel = 0;  ///< with the gaps that align pieces

  int64_t gradient_bytes() const noexcept { return numel * static_cast<int64_t>(c10::elementSize(gradient)); }
  int64_t parameter_bytes() const noexcept { return numel * static_cast<int64_t>(c10::elementSize(dtype)); }
};

/// All parameters laid end to end in registration order, cut into one contiguous shard a server, equal in bytes up to
/// a tile, and each shard into chunks, in order. Every element is in one chunk. A server whose share is empty has none.
std::vector<Chunk> cut_chunks(const Plan& plan);

}  // namespace muster::server
