// A worker's requests about the rows of tables.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <utility>
#include <vector>

#include "server/protocol/plan.h"
#include "server/worker/client_memory.h"
#include "server/worker/replay.h"
#include "server/worker/requests.h"

namespace muster::server {

/// Rows of a table that were ever written or pushed, ascending.
struct TableRows {
  std::vector<int64_t> rows;
  std::vector<float> values;  ///< rows.size() * dim
  std::vector<float> states;  ///< rows.size() * state_width(table)
  uint64_t steps = 0;         ///< that the optimizer counts, of all rows
};

/// Part of a ServerClient, whose comment holds. Tables are named by their index in the plan.
class RowClient {
 public:
  /// What it is given must outlive it.
  RowClient(const ClientConfig& config, ClientMemory& memory, Replay& replay, Requests& requests);

  /// Rows of a table (each once, in any order) that differ from its initialiser's: values (dim a row) and states
  /// (state_width a row); and how many steps its optimizer has counted.
  void write(uint32_t table, std::span<const int64_t> rows, std::span<const float> values,
             std::span<const float> states);
  void write_steps(uint32_t table, uint64_t steps);

  /// This worker's sums of rows (strictly ascending; gradients: rows.size() * dim), for all servers, as
  /// ServerClient::push of chunks. Every table of a step is pushed once, perhaps without rows.
  void push(uint64_t step, uint32_t table, std::span<const int64_t> rows, std::span<const float> gradients);

  /// Values of rows (in any order, which may repeat; values: rows.size() * dim), once the table has made `at_least`
  /// steps.
  void pull(uint32_t table, uint64_t at_least, std::span<const int64_t> rows, std::span<float> values);
  /// All rows that servers keep, once the table has made `at_least` steps. Where others step meanwhile, rows may be of
  /// different steps.
  TableRows fetch(uint32_t table, uint64_t at_least);
  /// Floats of optimizer state a row; see RowTable.
  int64_t state_width(uint32_t table) const { return state_widths_.at(table); }

 private:
  /// Where rows that are pulled arrive, by server and lane. Over a connection that was lost, a server may still write
  /// what was asked for: such a landing rests until no request can be served any more.
  struct Landing {
    uint64_t connects = 0;
    std::byte* memory = nullptr;
  };

  const TableSpec& table(uint32_t index) const;
  /// Places in `rows`, by server; each one's by stripe, and as they come.
  std::vector<std::vector<size_t>> divide(const TableSpec& table, std::span<const int64_t> rows) const;
  std::byte* landing_of(size_t server, uint32_t lane);

  const ClientConfig& config_;
  ClientMemory& memory_;
  Replay& replay_;
  Requests& requests_;
  std::vector<int64_t> state_widths_;  // by table
  std::vector<Landing> landings_;
  std::deque<std::pair<Requests::Clock::time_point, std::byte*>> resting_;
};

}  // namespace muster::server
