// A stripe of a table's rows that a server owns: rows, optimizer state, and the sums of what workers push of them.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <span>
#include <utility>
#include <vector>

#include "embedding/row_table.h"
#include "server/protocol/plan.h"
#include "server/shard/held_sums.h"

namespace muster::server {

/// One stripe of a table of a TableShard, which guards what is public here.
class HeldTable final : public HeldSums {
 public:
  /// `spec` is one of plan.tables; `plan` and `rules` must outlive it.
  HeldTable(const TableSpec& spec, uint32_t stripe, const Plan& plan, Steps& rules);

  /// The image's rows come block by block, each copied under rows_mutex, which steps wait for no longer than that.
  /// Waits for the end of an image that is under way.
  std::unique_ptr<Image> begin_image() override;
  std::unique_ptr<Image> begin_cut() override;
  bool restore(const Image::Facts& facts, const checkpoint::NamedTensors& tensors) override;

  /// The numbers of `count` rows that it had first, in no order; steps wait for a slice of them at a time.
  std::vector<int64_t> first_rows(uint64_t count);
  /// RowTable::copy_cut.
  void copy_cut(std::span<const int64_t> numbers, std::span<float> values, std::span<float> states);

  const TableSpec& spec;
  const uint32_t stripe;
  std::shared_mutex rows_mutex;  ///< of rows; taken under lock(), or alone to read
  RowTable rows;
  std::condition_variable_any image_ended;  ///< of rows_mutex
  uint64_t counted = 0;                     ///< steps, by the optimizer; guarded by lock()

 private:
  /// So many rows, whose values lie here side by side.
  using Run = std::pair<size_t, const float*>;

  kernels::NormSum add(uint64_t step, const std::vector<uint32_t>& members) override;
  void step(const Apply& apply, const WorkerSums* given) override;
  kernels::NormSum norm_of_sums() const;

  const Plan& plan_;
  // Guarded by lock():
  std::vector<int64_t> summed_;  // rows of the sums
  std::vector<Run> runs_;        // their sums: in `values_`, or what the only member pushed
  std::vector<float> values_;    // the sums of several members
};

}  // namespace muster::server
