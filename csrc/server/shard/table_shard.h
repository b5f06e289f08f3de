// The rows of sparse embeddings that one server owns, and the pushes of them that wait to be applied.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "server/protocol/plan.h"
#include "server/protocol/protocol.h"
#include "server/shard/held_table.h"
#include "server/shard/pushes.h"

namespace muster::server {

/// Thread-safe: a table is divided into stripes, each with a mutex, and one more for its rows, which several pulls
/// share. Tables are named by their index in the plan. Rows outside a table or of another server are an
/// InvalidArgument, which changes nothing.
class TableShard {
 public:
  /// `plan` and `rules` must outlive it. Throws InvalidArgument for tables whose optimizer moves every row.
  TableShard(const Plan& plan, uint32_t server, Steps& rules);
  ~TableShard();

  /// Sets rows, each of which comes once, and how many steps the optimizer has counted.
  void write(uint32_t table, std::span<const int64_t> rows, Bytes values, Bytes states);
  void write_steps(uint32_t table, uint64_t steps);

  /// Bytes of a row's values and state.
  size_t value_bytes(uint32_t table) const;
  size_t state_bytes(uint32_t table) const;

  /// Writes values of rows, in their order, to `to`, once their stripes have made `at_least` steps; returns how many
  /// all of these have made. Helps with a step that is being applied. Throws Timeout at the deadline. Rows that follow
  /// one another in a stripe are read at once.
  uint64_t pull(uint32_t table, uint64_t at_least, std::span<const int64_t> rows, std::span<float> to,
                Deadline deadline);

  /// Keeps a part of a push until it is applied, in all stripes; `owner` keeps `values` alive. False: it is held or
  /// applied already. Throws InvalidArgument, and changes nothing, as Pushes::hold, and where stripes do not ascend.
  bool hold(uint32_t rank, uint64_t incarnation, const PushRows& push, std::span<const int64_t> rows, Bytes values,
            const std::shared_ptr<const void>& owner);

  /// Adds what `members` pushed of a table, ahead of the demand, if all of them did.
  void sum_early(uint32_t table, uint64_t step, const std::vector<uint32_t>& members);

  /// `count` rows of a stripe, from the `first`-th on, fewer at the end, once it has made `at_least` steps.
  struct Rows {
    std::vector<int64_t> rows;
    std::vector<float> values;
    std::vector<float> states;
    uint64_t total = 0;
    uint64_t counted = 0;  ///< steps, by the optimizer
  };
  Rows fetch(const FetchRows& request, size_t count, Deadline deadline);

  /// Throws InvalidArgument for hyperparameters that no table can be stepped by.
  void check(const Apply& apply) const;

  /// By table, the last step that all of its stripes applied; see Shard::steps.
  std::vector<uint64_t> steps(uint32_t rank, uint64_t incarnation) const;

  /// Stripes, by table.
  std::vector<HeldSums*> members() const;
  uint32_t num_stripes(uint32_t table) const { return this->table(table).division.count(); }
  HeldTable& stripe(uint32_t table, uint32_t stripe) const { return *this->table(table).stripes.at(stripe); }
  /// Which stripe of its table a row is in.
  uint32_t stripe_of(uint32_t table, int64_t row) const { return this->table(table).division.of(row); }
  /// The table of one of members().
  const TableSpec& spec_of(size_t member) const;

 private:
  /// Rows that follow one another in a request and are of one stripe.
  struct Run {
    HeldTable* stripe;
    size_t first;
    size_t count;
  };
  struct Table {
    Table(const TableSpec& spec, const Plan& plan, Steps& rules);
    RowSharding sharding;
    RowStripes division;
    std::vector<std::unique_ptr<HeldTable>> stripes;
    std::mutex holding;  ///< a push is held in all stripes or in none: taken before their locks
  };

  Table& table(uint32_t index) const;
  /// Checks rows, and divides them.
  std::vector<Run> runs_of(const Table& table, std::span<const int64_t> rows) const;

  const Plan& plan_;
  const uint32_t server_;
  std::vector<std::unique_ptr<Table>> tables_;
};

}  // namespace muster::server
