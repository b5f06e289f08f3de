// Parameter servers in this process, workers that push what anybody can compute again, and what must come of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/protocol/plan.h"
#include "server/shard/server.h"
#include "server/worker/client.h"

namespace muster::testing {

/// A model of several dtypes, with a parameter larger than a chunk, a scalar and an empty one.
server::Plan small_plan(uint32_t servers, uint32_t workers, const FlatGroups& groups);

/// Names that nobody else uses.
std::vector<std::string> server_names(uint32_t servers);

struct Servers {
  explicit Servers(std::vector<std::string> names) : names(std::move(names)) {
    for (const auto& name : this->names) {
      running.push_back(std::make_unique<server::ParameterServer>(server::ServerConfig{.name = name}));
    }
  }
  std::vector<std::string> names;
  std::vector<std::unique_ptr<server::ParameterServer>> running;
};

/// Of a worker that keeps as little as it can.
server::ClientConfig config_of(const std::vector<std::string>& names, uint32_t rank, const server::Plan& plan,
                               bool shares_memory = true);

/// What somebody pushes of a table in a step: rows, ascending, and the gradient of each. The first step touches most of
/// them, later ones few, and one that is new.
struct PushedRows {
  std::vector<int64_t> rows;
  std::vector<float> gradients;
};
PushedRows pushed_rows(const server::TableSpec& table, uint64_t step);

/// Parameter p's values before the first step, in its dtype, contiguous.
at::Tensor initial_values(const server::Plan& plan, size_t parameter);
/// What `rank` adds to the gradient of parameter p in a step, in the accumulation dtype: of weight_of(rank) samples.
at::Tensor gradient_of(const server::Plan& plan, size_t parameter, uint32_t rank, uint64_t step);
/// Those of ranks below `workers`, added as servers add them.
at::Tensor sum_of(const server::Plan& plan, size_t parameter, uint32_t workers, uint64_t step);
double weight_of(uint32_t rank);

/// A worker, as a strategy drives one.
struct Worker {
  explicit Worker(server::ClientConfig config);

  /// The chief's, of initial values.
  void write();
  /// The chief writes the values where the servers have none; then joins.
  uint64_t join();
  /// All that a step needs; of tables `num_rows` rows.
  void push(uint64_t step);
  void push_chunks(uint64_t step);
  /// A whole synchronous step.
  void step(uint64_t step, double clip_norm = 0, const FlatGroups* groups = nullptr);
  /// A whole step on its own.
  void step_alone(uint64_t step);
  /// Parameters by index, contiguous.
  std::vector<at::Tensor> parameters(uint64_t at_least);

  server::Plan plan;
  uint32_t rank;
  server::ServerClient client;
  server::Decision decision;                // of the last step
  double norm = 0;                          // of the last step
  uint32_t skipped_parameter = 0xffffffff;  // nobody uses it: it is pushed as zeros
  uint64_t shift = 0;                       // its gradients are those of so many steps later
  int64_t num_rows = 0;                     // that it pushes of each table

 private:
  void spoil_pushed();

  std::vector<std::byte*> landing_;
  std::shared_ptr<std::vector<at::Tensor>> pushed_;  // of the last push
};

/// Parameters after `steps` synchronous steps of `workers`, computed whole.
std::vector<at::Tensor> reference(const server::Plan& plan, uint32_t workers, uint64_t steps, double clip_norm = 0,
                                  uint32_t skipped_parameter = 0xffffffff, double* norm = nullptr);

bool bit_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);

}  // namespace muster::testing
