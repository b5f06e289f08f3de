// One worker's values and rows on servers of this process.
#pragma once

#include <utility>
#include <vector>

#include "core/flat_layout.h"
#include "cpp/window/fixtures.h"
#include "job/server_job.h"
#include "support/servers.h"
#include "window/server_values.h"

namespace muster::testing {

inline ParameterSpec spec_of(const char* name, const at::Tensor& tensor) {
  return {name, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

/// What one worker's dense `parameters`, or `tables`, make a plan of.
inline server::Plan plan_of(std::vector<ParameterSpec> parameters, std::vector<server::TableSpec> tables,
                            const FlatGroups& groups) {
  server::Plan plan;
  plan.group_of.resize(parameters.size());
  plan.parameters = std::move(parameters);
  plan.tables = std::move(tables);
  plan.groups = groups;
  plan.timeout_ms = 60'000;
  return plan;
}

/// A server, and the job of its workers.
struct OneServer {
  explicit OneServer(uint32_t staleness = 0) : staleness(staleness) {}
  ServerJob job() const { return {.channels = servers.names, .staleness = staleness, .embedded = nullptr}; }

  Servers servers{server_names(1)};
  uint32_t staleness;
};

/// Rows of 2 that differ from one another.
inline EmbeddingRows some_rows() { return {.initialiser = {RowInitialiser::Kind::normal, 1, 5}}; }

inline at::Tensor initial_rows(int64_t num_rows) {
  auto rows = at::full({num_rows, 2}, 0, at::kFloat);
  some_rows().initialiser.fill_rows(rows);
  return rows;
}

}  // namespace muster::testing
