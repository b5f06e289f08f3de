// The rows of embeddings that parameter servers alone hold.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "embedding/table_contents.h"
#include "server/protocol/plan.h"
#include "server/worker/client.h"
#include "window/server_values.h"

namespace muster {

/// An embedding's weight becomes a stub, whose row source asks the servers. Tables are numbered as in the servers'
/// plan. Owned by the thread that steps, but for row sources, which replicas ask in a step; what reaches a server
/// throws as ServerClient. Client, its mutex and plan outlive this.
class RowsOnServers {
 public:
  /// `in_step`: held while a row source uses the client.
  RowsOnServers(server::ServerClient& client, std::mutex& in_step, const server::Plan& plan)
      : client_(client), in_step_(in_step), plan_(plan) {}

  /// Adds the plan's next table, which has `position` in the optimizer. `contents`: what a stub is to begin with; null:
  /// all rows are the initialiser's.
  void add(const at::Tensor& weight, size_t position, std::shared_ptr<const TableContents> contents = nullptr);
  size_t size() const noexcept { return tables_.size(); }

  /// Sends the chief's rows, in blocks: only rows whose value or optimizer state differs from the initialiser's.
  void give(const FlatOptimizer& optimizer);

  /// Leaves stubs in the place of the weights' rows.
  void leave();
  /// Gives weights all their rows again, but those that had none here to begin with. Never throws: where servers are
  /// gone, stubs stay.
  void bring_back() noexcept;

  /// From here on tables are read as they are after this step, at least.
  void read_after(uint64_t step) noexcept { at_least_ = step; }

  /// Whether the weight had rows before leave().
  bool was_here(size_t table) const noexcept { return tables_[table].was_here; }
  /// Whether a weight was written or replaced since leave().
  bool was_written(size_t table) const;

  /// This worker's sums of a table's rows for `step`: coalesced COO, fp32; undefined where there are none.
  void push(uint64_t step, size_t table, const at::Tensor& sums);

  /// The rows that servers keep.
  TableContents contents(size_t table);

  /// Parts of a whole table (Part::steps: 0-dim fp32), in their order; undefined where there is none. Servers send it
  /// once, however many they are.
  std::vector<at::Tensor> fetch(size_t table, std::span<const server::Part> parts);

 private:
  class Source;

  struct Table {
    at::Tensor weight;
    size_t position;
    std::shared_ptr<const TableContents> contents;  // until leave()
    int64_t version;                                // of the weight, as the stub that it is
    bool was_here;
    std::shared_ptr<Source> source;
  };

  void give_contents(uint32_t table, const TableContents& contents);
  bool has(size_t table, server::Part part) const;
  at::Tensor whole(size_t table, server::Part part, server::TableRows& touched) const;

  server::ServerClient& client_;
  std::mutex& in_step_;
  const server::Plan& plan_;
  std::vector<Table> tables_;
  uint64_t at_least_ = 0;
};

}  // namespace muster
