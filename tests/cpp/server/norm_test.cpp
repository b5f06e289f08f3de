// The norm of a job's gradients: its bits do not depend on which server has what.
#include <ATen/ops/from_blob.h>
#include <ATen/ops/sparse_coo_tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "cpp/catch.h"
#include "kernels/norm_sum.h"
#include "optimizer/gradient_norm.h"
#include "support/run_ranks.h"
#include "support/servers.h"

using namespace muster;
using namespace muster::server;

namespace {

constexpr uint32_t kNormWorkers = 2;
constexpr uint32_t kSkipped = 3;

// Dense parameters, and tables: one of many stripes, one of rows longer than a tile, of which the last has none in a
// step.
Plan mixed_plan(uint32_t servers, RowPlacement placement, double norm_type) {
  auto plan = testing::small_plan(servers, kNormWorkers, std::vector<kernels::SgdGroup>(2));
  plan.tables = {{"small", 10'000'000, 5, placement, {}, 0},
                 {"long", 50, static_cast<int64_t>(kernels::kTile) + 7, placement, {}, 0},
                 {"unused", 10, 3, placement, {}, 0}};
  plan.norm_type = norm_type;
  return plan;
}

// Of a rank, some of them both ranks'. Their sizes are far apart, so that an order of addition would show.
std::map<int64_t, std::vector<float>> rows_of(const TableSpec& table, uint32_t rank) {
  std::map<int64_t, std::vector<float>> rows;
  if (table.name == "unused") return rows;
  const int64_t stride = std::max<int64_t>(table.num_rows / 1000, 1);
  for (int64_t row = rank * stride; row < table.num_rows; row += (2 + rank) * stride) {
    auto& values = rows[row];
    for (int64_t i = 0; i < table.dim; ++i) {
      values.push_back(std::ldexp(std::sin(static_cast<float>(row / stride * 7 + i + rank)),
                                  static_cast<int>(row / stride % 41) - 20));
    }
  }
  return rows;
}

at::Tensor sum_of_rows(const TableSpec& table) {
  auto sums = rows_of(table, 0);
  for (const auto& [row, values] : rows_of(table, 1)) {
    auto& sum = sums[row];
    if (sum.empty()) sum.resize(values.size());
    for (size_t i = 0; i < values.size(); ++i) sum[i] += values[i];
  }
  std::vector<int64_t> rows;
  std::vector<float> all;
  for (const auto& [row, values] : sums) {
    rows.push_back(row);
    all.insert(all.end(), values.begin(), values.end());
  }
  const auto count = static_cast<int64_t>(rows.size());
  const auto indices = at::from_blob(rows.data(), {1, count}, at::kLong).clone();
  const auto values = at::from_blob(all.data(), {count, table.dim}, at::kFloat).clone();
  return at::sparse_coo_tensor(indices, values, {table.num_rows, table.dim}, at::kFloat)._coalesced_(true);
}

kernels::StepScalars scalars_of(double norm_type, const auto& fill) {
  const double tail[kernels::kTailFields] = {3, 0, kNormWorkers, 0, 0, 0, kNormWorkers, 0};
  kernels::WindowOptions options{};
  options.loss_scale = 1;
  options.norm_type = norm_type;
  kernels::StepScalars scalars{.divisor = 1, .clip = 1, .norm = 0, .unit = 1, .finite = 1, .dropped = 0};
  fill(tail, options, scalars);
  return scalars;
}

// As a worker takes it that has all sums.
kernels::StepScalars local_norm(const Plan& plan, bool skips) {
  std::vector<at::Tensor> sums;
  for (uint32_t p = 0; p < plan.parameters.size(); ++p) {
    if (!skips || p != kSkipped) sums.push_back(testing::sum_of(plan, p, kNormWorkers, 1));
  }
  for (const auto& table : plan.tables) {
    if (table.name != "unused") sums.push_back(sum_of_rows(table));
  }
  return scalars_of(plan.norm_type, [&](const auto* tail, const auto& options, auto& scalars) {
    take_norm(sums, tail, options, scalars);
  });
}

kernels::NormSum norm_of_job(const Plan& plan, bool skips) {
  const testing::Servers running(testing::server_names(plan.servers));
  std::vector<kernels::NormSum> sums(kNormWorkers);
  const std::string failures = testing::run_threads(kNormWorkers, [&](int index) {
    const auto rank = static_cast<uint32_t>(index);
    testing::Worker worker(testing::config_of(running.names, rank, plan));
    if (skips) worker.skipped_parameter = kSkipped;
    worker.join();
    worker.push_chunks(1);
    for (uint32_t t = 0; t < plan.tables.size(); ++t) {
      std::vector<int64_t> rows;
      std::vector<float> gradients;
      for (const auto& [row, values] : rows_of(plan.tables[t], rank)) {
        rows.push_back(row);
        gradients.insert(gradients.end(), values.begin(), values.end());
      }
      worker.client.rows().push(1, t, rows, gradients);
    }
    worker.client.flush();
    const auto members = worker.client.commit(1, {1}).members;
    sums[rank] = worker.client.sum(1, members);
  });
  CHECK(failures == "");
  CHECK(sums[0] == sums[1]);
  return sums[0];
}

}  // namespace

TEST_CASE("a norm has the bits of one that is taken of all sums in one place", "[server]") {
  for (const double norm_type : {2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    for (const bool skips : {false, true}) {
      const auto local = local_norm(mixed_plan(1, RowPlacement::modulo, norm_type), skips);
      CHECK(local.norm > 0);
      for (const auto placement : {RowPlacement::modulo, RowPlacement::range}) {
        for (const uint32_t servers : {1U, 2U, 3U}) {
          CAPTURE(norm_type, skips, placement, servers);
          const auto sum = norm_of_job(mixed_plan(servers, placement, norm_type), skips);
          const auto scalars = scalars_of(norm_type, [&](const auto* tail, const auto& options, auto& out) {
            finish_norm(sum, tail, options, out);
          });
          CHECK((scalars == local));
        }
      }
    }
  }
}
