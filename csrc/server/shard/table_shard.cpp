#include "server/shard/table_shard.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <string>

#include "kernels/kernels.h"
#include "muster/error.h"

namespace muster::server {

namespace {

std::span<const float> span_of(Bytes bytes) {
  return {reinterpret_cast<const float*>(bytes.data()), bytes.size() / sizeof(float)};
}

}  // namespace

TableShard::TableShard(const Plan& plan, uint32_t server, Steps& rules) : plan_(plan), server_(server) {
  for (const auto& spec : plan_.tables) tables_.push_back(std::make_unique<HeldTable>(spec, plan_, rules));
}

TableShard::~TableShard() = default;

HeldTable& TableShard::table(uint32_t index) const {
  if (index < tables_.size()) return *tables_[index];
  throw InvalidArgument("there is no table " + std::to_string(index) +
                        "; run one version of Muster on all workers and servers");
}

void TableShard::check_rows(const HeldTable& own, std::span<const int64_t> rows) const {
  for (const int64_t row : rows) {
    if (row < 0 || row >= own.spec.num_rows) {
      throw InvalidArgument("row " + std::to_string(row) + " is not in [0, " + std::to_string(own.spec.num_rows) +
                            "): table '" + own.spec.name + "' has so many rows");
    }
    if (own.sharding.server_of(row) != static_cast<int>(server_)) {
      throw InvalidArgument("row " + std::to_string(row) + " of table '" + own.spec.name +
                            "' is another server's; give all workers the servers in one order");
    }
  }
}

size_t TableShard::value_bytes(uint32_t index) const {
  return static_cast<size_t>(table(index).spec.dim) * sizeof(float);
}

size_t TableShard::state_bytes(uint32_t index) const {
  return static_cast<size_t>(table(index).rows.state_width()) * sizeof(float);
}

void TableShard::write(uint32_t index, std::span<const int64_t> rows, Bytes values, Bytes states) {
  auto& own = table(index);
  check_rows(own, rows);
  const auto lock = own.lock();
  const std::unique_lock writing(own.rows_mutex);
  own.rows.import_rows(rows, span_of(values), span_of(states));
}

void TableShard::write_steps(uint32_t index, uint64_t steps) {
  auto& own = table(index);
  const auto lock = own.lock();
  own.counted = steps;
}

uint64_t TableShard::pull(uint32_t index, uint64_t at_least, std::span<const int64_t> rows, std::span<float> to,
                          Deadline deadline) {
  auto& own = table(index);
  check_rows(own, rows);
  auto lock = own.lock_after(at_least, deadline);
  const std::shared_lock reading(own.rows_mutex);
  const uint64_t steps = own.steps();
  lock.unlock();
  own.rows.pull(rows, to);
  return steps;
}

bool TableShard::hold(uint32_t rank, uint64_t incarnation, const PushRows& push, const std::vector<int64_t>& rows,
                      Bytes values, std::shared_ptr<const void> owner) {
  auto& own = table(push.table);
  check_rows(own, rows);
  return own.keep(rank, incarnation, {push.step, push.part, push.parts}, rows, values, std::move(owner));
}

void TableShard::sum_early(uint32_t index, uint64_t step, const std::vector<uint32_t>& members) {
  table(index).sum_early(step, members);
}

void TableShard::sum(const SumRows& request, Deadline deadline, const ConsumeSums& consume) {
  auto& own = table(request.table);
  auto lock = own.lock();
  const auto& known = own.sum(lock, request.step, request.members, deadline);
  consume(known.rows, known.partials);
}

TableShard::Rows TableShard::fetch(const FetchRows& request, size_t count, Deadline deadline) {
  auto& own = table(request.table);
  auto lock = own.lock_after(request.at_least, deadline);
  const std::shared_lock reading(own.rows_mutex);
  Rows rows;
  rows.counted = own.counted;
  lock.unlock();
  rows.total = static_cast<uint64_t>(own.rows.size());
  const uint64_t first = std::min(request.first, rows.total);
  rows.rows.resize(std::min<uint64_t>(count, rows.total - first));
  rows.values.resize(rows.rows.size() * static_cast<size_t>(own.spec.dim));
  rows.states.resize(rows.rows.size() * static_cast<size_t>(own.rows.state_width()));
  own.rows.export_rows(static_cast<int64_t>(first), rows.rows, rows.values, rows.states);
  return rows;
}

void TableShard::check(const Apply& apply) const {
  for (const auto& own : tables_) {
    const bool is_same = apply.groups.index() == plan_.groups.index() &&
                         empty_table(own->spec, apply.groups).state_width() == own->rows.state_width();
    if (!is_same) {
      throw InvalidArgument("the optimizer of table '" + own->spec.name +
                            "' cannot change; keep the kind that the job began with");
    }
  }
}

void TableShard::apply(uint32_t rank, uint64_t incarnation, const Apply& apply, Deadline deadline) {
  const size_t count = tables_.size();
  for (size_t i = 0; i < count; ++i) {
    // Each thread begins elsewhere, so that they divide the work.
    auto& own = *tables_[(i + count * rank / std::max<size_t>(plan_.workers, rank + 1)) % count];
    if (plan_.is_synchronous()) {
      own.apply_together(apply, deadline);
    } else {
      const auto lock = own.lock();
      own.apply_alone(rank, incarnation, apply);
    }
  }
}

std::vector<HeldSums*> TableShard::members() const {
  std::vector<HeldSums*> members;
  for (const auto& own : tables_) members.push_back(own.get());
  return members;
}

}  // namespace muster::server
