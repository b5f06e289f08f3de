#include "server/shard/table_shard.h"

#include <algorithm>
#include <limits>
#include <mutex>
#include <string>
#include <utility>

#include "muster/error.h"

namespace muster::server {

namespace {

std::span<const float> span_of(Bytes bytes) {
  return {reinterpret_cast<const float*>(bytes.data()), bytes.size() / sizeof(float)};
}

}  // namespace

TableShard::Table::Table(const TableSpec& spec, const Plan& plan, Steps& rules)
    : sharding(sharding_of(spec, plan)), division(stripes_of(spec, plan)) {
  for (uint32_t s = 0; s < division.count(); ++s) {
    stripes.push_back(std::make_unique<HeldTable>(spec, s, plan, rules));
  }
}

TableShard::TableShard(const Plan& plan, uint32_t server, Steps& rules) : plan_(plan), server_(server) {
  for (const auto& spec : plan.tables) tables_.push_back(std::make_unique<Table>(spec, plan_, rules));
}

TableShard::~TableShard() = default;

TableShard::Table& TableShard::table(uint32_t index) const {
  if (index < tables_.size()) return *tables_[index];
  throw InvalidArgument("there is no table " + std::to_string(index) +
                        "; run one version of Muster on all workers and servers");
}

std::vector<TableShard::Run> TableShard::runs_of(const Table& own, std::span<const int64_t> rows) const {
  const auto& spec = own.stripes.front()->spec;
  std::vector<Run> runs;
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t row = rows[i];
    if (row < 0 || row >= spec.num_rows) {
      throw InvalidArgument("row " + std::to_string(row) + " is not in [0, " + std::to_string(spec.num_rows) +
                            "): table '" + spec.name + "' has so many rows");
    }
    if (own.sharding.server_of(row) != static_cast<int>(server_)) {
      throw InvalidArgument("row " + std::to_string(row) + " of table '" + spec.name +
                            "' is another server's; give all workers the servers in one order");
    }
    auto* const stripe = own.stripes[own.division.of(row)].get();
    if (runs.empty() || runs.back().stripe != stripe) runs.push_back({stripe, i, 0});
    ++runs.back().count;
  }
  return runs;
}

size_t TableShard::value_bytes(uint32_t index) const {
  return static_cast<size_t>(table(index).stripes.front()->spec.dim) * sizeof(float);
}

size_t TableShard::state_bytes(uint32_t index) const {
  return static_cast<size_t>(table(index).stripes.front()->rows.state_width()) * sizeof(float);
}

void TableShard::write(uint32_t index, std::span<const int64_t> rows, Bytes values, Bytes states) {
  const size_t dim = value_bytes(index) / sizeof(float);
  const size_t width = state_bytes(index) / sizeof(float);
  for (const auto& [stripe, first, count] : runs_of(table(index), rows)) {
    const auto lock = stripe->lock();
    const std::unique_lock writing(stripe->rows_mutex);
    stripe->rows.import_rows(rows.subspan(first, count), span_of(values).subspan(first * dim, count * dim),
                             span_of(states).subspan(first * width, count * width));
  }
}

void TableShard::write_steps(uint32_t index, uint64_t steps) {
  for (const auto& stripe : table(index).stripes) {
    const auto lock = stripe->lock();
    stripe->counted = steps;
  }
}

uint64_t TableShard::pull(uint32_t index, uint64_t at_least, std::span<const int64_t> rows, std::span<float> to,
                          Deadline deadline) {
  const size_t dim = value_bytes(index) / sizeof(float);
  uint64_t least = std::numeric_limits<uint64_t>::max();
  const auto read = [&](const Run& run, Pushes::Lock lock) {
    const std::shared_lock reading(run.stripe->rows_mutex);
    least = std::min(least, run.stripe->steps());
    lock.unlock();
    run.stripe->rows.pull(rows.subspan(run.first, run.count), to.subspan(run.first * dim, run.count * dim));
  };
  std::vector<Run> others;  // which somebody is at, or which lack steps
  for (const auto& run : runs_of(table(index), rows)) {
    auto lock = run.stripe->try_lock();
    if (lock && run.stripe->steps() >= at_least) {
      read(run, std::move(lock));
    } else {
      others.push_back(run);
    }
  }
  for (const auto& run : others) read(run, run.stripe->lock_after(at_least, deadline));
  return rows.empty() ? 0 : least;
}

bool TableShard::hold(uint32_t rank, uint64_t incarnation, const PushRows& push, std::span<const int64_t> rows,
                      Bytes values, const std::shared_ptr<const void>& owner) {
  auto& own = table(push.table);
  const size_t row_bytes = value_bytes(push.table);
  const Pushes::Portion part{push.step, push.part, push.parts};
  std::vector<Run> runs;  // of all stripes
  for (const auto& stripe : own.stripes) runs.push_back({stripe.get(), 0, 0});
  uint32_t next = 0;
  for (const auto& run : runs_of(own, rows)) {
    if (run.stripe->stripe < next) {
      throw InvalidArgument("a push of table '" + run.stripe->spec.name +
                            "' has its rows in another order than by stripe; run one version of Muster on all workers "
                            "and servers");
    }
    next = run.stripe->stripe + 1;
    runs[run.stripe->stripe] = run;
  }
  const std::lock_guard holding(own.holding);
  for (const auto& run : runs) {
    const auto lock = run.stripe->lock();
    run.stripe->would_hold(rank, incarnation, part, rows.subspan(run.first, run.count));
  }
  bool is_fresh = false;
  for (const auto& run : runs) {
    const auto of_run = values.subspan(run.first * row_bytes, run.count * row_bytes);
    is_fresh = run.stripe->keep(rank, incarnation, part, rows.subspan(run.first, run.count), of_run, owner) || is_fresh;
  }
  return is_fresh;
}

void TableShard::sum_early(uint32_t index, uint64_t step, const std::vector<uint32_t>& members) {
  for (const auto& stripe : table(index).stripes) stripe->sum_early(step, members);
}

TableShard::Rows TableShard::fetch(const FetchRows& request, size_t count, Deadline deadline) {
  const auto& stripes = table(request.table).stripes;
  if (request.stripe >= stripes.size()) {
    throw InvalidArgument("there is no stripe " + std::to_string(request.stripe) +
                          "; run one version of Muster on all workers and servers");
  }
  auto& own = *stripes[request.stripe];
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

void TableShard::check(const Apply& apply) const { plan_.check_groups(apply.groups); }

std::vector<uint64_t> TableShard::steps(uint32_t rank, uint64_t incarnation) const {
  std::vector<uint64_t> steps;
  for (const auto& own : tables_) {
    uint64_t least = std::numeric_limits<uint64_t>::max();
    for (const auto& stripe : own->stripes) least = std::min(least, stripe->step_of(rank, incarnation));
    steps.push_back(least);
  }
  return steps;
}

std::vector<HeldSums*> TableShard::members() const {
  std::vector<HeldSums*> members;
  for (const auto& own : tables_) {
    for (const auto& stripe : own->stripes) members.push_back(stripe.get());
  }
  return members;
}

const TableSpec& TableShard::spec_of(size_t member) const {
  return static_cast<const HeldTable*>(members().at(member))->spec;
}

}  // namespace muster::server
