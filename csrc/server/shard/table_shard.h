// The rows of sparse embeddings that one server owns, and the pushes of them that wait to be applied.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "server/protocol/plan.h"
#include "server/protocol/protocol.h"
#include "server/shard/held_table.h"
#include "server/shard/pushes.h"

namespace muster::server {

/// Thread-safe: one mutex a table, and one more for its rows, which several pulls share. Tables are named by their
/// index in the plan. Rows outside a table or of another server are an InvalidArgument, which changes nothing.
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

  /// Writes values of rows, in their order, to `to`, once the table has made `at_least` steps; returns how many it has
  /// made. Helps with a step that is being applied. Throws Timeout at the deadline.
  uint64_t pull(uint32_t table, uint64_t at_least, std::span<const int64_t> rows, std::span<float> to,
                Deadline deadline);

  /// Keeps a part of a push until it is applied; `owner` keeps `values` alive. False: it is held or applied already.
  /// Throws InvalidArgument as Pushes::hold.
  bool hold(uint32_t rank, uint64_t incarnation, const PushRows& push, const std::vector<int64_t>& rows, Bytes values,
            std::shared_ptr<const void> owner);

  /// Adds what `members` pushed of a table, ahead of the demand, if all of them did.
  void sum_early(uint32_t table, uint64_t step, const std::vector<uint32_t>& members);

  /// Calls `consume` with the rows of the sums over `members` and their partials, num_tiles(dim) a row. Waits for
  /// pushes that may still come.
  using ConsumeSums = std::function<void(std::span<const int64_t> rows, std::span<const double> partials)>;
  void sum(const SumRows& request, Deadline deadline, const ConsumeSums& consume);

  /// `count` rows that are kept, from the `first`-th on, fewer at the end, once the table has made `at_least` steps.
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
  /// As Shard::apply.
  void apply(uint32_t rank, uint64_t incarnation, const Apply& apply, Deadline deadline);

  /// By table.
  std::vector<HeldSums*> members() const;
  size_t num_tables() const noexcept { return tables_.size(); }

 private:
  HeldTable& table(uint32_t index) const;
  void check_rows(const HeldTable& table, std::span<const int64_t> rows) const;

  const Plan& plan_;
  const uint32_t server_;
  std::vector<std::unique_ptr<HeldTable>> tables_;
};

}  // namespace muster::server
