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

const float* floats_of(Bytes bytes) { return reinterpret_cast<const float*>(bytes.data()); }

std::span<const float> span_of(Bytes bytes) { return {floats_of(bytes), bytes.size() / sizeof(float)}; }

// Goes through a contribution row by row.
class Cursor {
 public:
  Cursor(uint32_t rank, const Contribution& given) : rank_(rank), given_(&given) { skip_ends(); }

  uint32_t rank() const { return rank_; }
  bool is_at_end() const { return row_ == given_->rows.size(); }
  int64_t row() const { return given_->rows[row_]; }
  const float* values(size_t dim) const { return floats_of(given_->parts[part_].values) + row_of_part_ * dim; }

  void advance() {
    ++row_;
    ++row_of_part_;
    skip_ends();
  }

  // For a heap, whose first is the greatest.
  static bool comes_later(const Cursor& a, const Cursor& b) {
    return a.row() != b.row() ? a.row() > b.row() : a.rank_ > b.rank_;
  }

 private:
  void skip_ends() {
    while (part_ < given_->parts.size() && row_of_part_ == given_->parts[part_].rows) {
      ++part_;
      row_of_part_ = 0;
    }
  }

  uint32_t rank_;
  const Contribution* given_;
  size_t row_ = 0;
  size_t part_ = 0;
  size_t row_of_part_ = 0;
};

// Adds rows of several ranks. Neighbours that the same ranks gave side by side are added at once.
class RowAdder {
 public:
  RowAdder(size_t dim, size_t num_ranks, std::vector<float>& sums) : dim_(dim), sums_(sums), sources_(num_ranks) {}

  /// The next row's values, by ascending rank.
  using Given = std::vector<std::pair<uint32_t, const float*>>;
  void add(const Given& given) {
    if (!continues(given)) {
      flush();
      first_ = given;
    }
    ++rows_;
  }

  void flush() {
    if (rows_ == 0) return;
    const size_t n = rows_ * dim_;
    if (sums_.size() < done_ + n) sums_.resize(std::max(done_ + n, sums_.size() + sums_.size() / 2));
    for (const auto& [rank, values] : first_) sources_[rank] = values;
    void* destination = sums_.data() + done_;
    kernels::tree_reduce(kernels::DType::f32, kernels::Reduction::sum, sources_.data(),
                         static_cast<int>(sources_.size()), &destination, 1, n);
    for (const auto& [rank, values] : first_) sources_[rank] = nullptr;
    done_ += n;
    rows_ = 0;
  }

 private:
  bool continues(const Given& given) const {
    if (rows_ == 0 || given.size() != first_.size()) return false;
    for (size_t i = 0; i < given.size(); ++i) {
      if (given[i].first != first_[i].first || given[i].second != first_[i].second + rows_ * dim_) return false;
    }
    return true;
  }

  size_t dim_;
  std::vector<float>& sums_;
  std::vector<const void*> sources_;  // by rank
  Given first_;                       // of the rows that are added at once
  size_t rows_ = 0;                   // so many
  size_t done_ = 0;                   // floats
};

}  // namespace

TableShard::Table::Table(const TableSpec& spec, const Plan& plan, Steps& rules)
    : Pushes(rules), spec(spec), sharding(sharding_of(spec, plan)), rows(empty_table(spec, plan.groups)) {}

TableShard::TableShard(const Plan& plan, uint32_t server, Steps& rules) : plan_(plan), server_(server) {
  for (const auto& spec : plan_.tables) tables_.push_back(std::make_unique<Table>(spec, plan_, rules));
}

TableShard::~TableShard() = default;

TableShard::Table& TableShard::table(uint32_t index) const {
  if (index < tables_.size()) return *tables_[index];
  throw InvalidArgument("there is no table " + std::to_string(index) +
                        "; run one version of Muster on all workers and servers");
}

void TableShard::check_rows(const Table& own, std::span<const int64_t> rows) const {
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

// Once `at_least` steps are made.
Pushes::Lock TableShard::lock_after(Table& own, uint64_t at_least, Deadline deadline) {
  auto lock = own.lock();
  if (const auto command = own.wait_for_steps(lock, at_least, deadline)) {
    lock.unlock();
    apply_together(own, *command, deadline);
    lock.lock();
  }
  return lock;
}

uint64_t TableShard::pull(uint32_t index, uint64_t at_least, std::span<const int64_t> rows, std::span<float> to,
                          Deadline deadline) {
  auto& own = table(index);
  check_rows(own, rows);
  auto lock = lock_after(own, at_least, deadline);
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
  const auto lock = own.lock();
  if (!own.hold(rank, incarnation, {push.step, push.part, push.parts}, rows, values, std::move(owner))) return false;
  if (own.sums.step == push.step) own.sums.step = 0;
  return true;
}

void TableShard::sum_early(uint32_t index, uint64_t step, const std::vector<uint32_t>& members) {
  auto& own = table(index);
  const auto lock = own.lock();
  if (own.has_all(step, members)) add(own, step, members);
}

// Sums what `members` pushed; all of them have.
void TableShard::add(Table& own, uint64_t step, const std::vector<uint32_t>& members) const {
  auto& sums = own.sums;
  if (sums.step == step && sums.members == members) return;
  sums.step = 0;
  sums.rows.clear();
  sums.runs.clear();
  const auto dim = static_cast<size_t>(own.spec.dim);
  if (members.size() == 1) {
    const auto& given = *own.find(step, members.front());
    sums.rows = given.rows;
    for (const auto& part : given.parts) sums.runs.emplace_back(part.rows, floats_of(part.values));
  } else if (!members.empty()) {
    std::vector<Cursor> heap;
    for (const uint32_t rank : members) {
      const Cursor cursor(rank, *own.find(step, rank));
      if (!cursor.is_at_end()) heap.push_back(cursor);
    }
    std::make_heap(heap.begin(), heap.end(), Cursor::comes_later);
    RowAdder adder(dim, members.back() + 1, sums.values);
    RowAdder::Given given;
    while (!heap.empty()) {
      const int64_t row = heap.front().row();
      given.clear();
      while (!heap.empty() && heap.front().row() == row) {
        std::pop_heap(heap.begin(), heap.end(), Cursor::comes_later);
        auto& cursor = heap.back();
        given.emplace_back(cursor.rank(), cursor.values(dim));
        cursor.advance();
        if (cursor.is_at_end()) {
          heap.pop_back();
        } else {
          std::push_heap(heap.begin(), heap.end(), Cursor::comes_later);
        }
      }
      adder.add(given);
      sums.rows.push_back(row);
    }
    adder.flush();
    sums.runs.emplace_back(sums.rows.size(), sums.values.data());
  }
  take_partials(sums, dim);
  sums.step = step;
  sums.members = members;
}

void TableShard::take_partials(Sums& sums, size_t dim) const {
  const size_t tiles = kernels::num_tiles(dim);
  sums.partials.resize(sums.rows.size() * tiles);
  std::array<kernels::StatsSegment, 64> segments{};
  size_t count = 0;
  double* partials = sums.partials.data();
  for (const auto& [rows, values] : sums.runs) {
    for (size_t row = 0; row < rows; ++row, partials += tiles) {
      segments[count++] = {values + row * dim, partials, dim, kernels::DType::f32};
      if (count < segments.size()) continue;
      kernels::grad_stats(segments.data(), count, plan_.norm_type);
      count = 0;
    }
  }
  kernels::grad_stats(segments.data(), count, plan_.norm_type);
}

void TableShard::sum(const SumRows& request, Deadline deadline, const ConsumeSums& consume) {
  auto& own = table(request.table);
  auto lock = own.lock();
  const auto present = own.wait_for_pushes(lock, request.step, request.members, deadline);
  if (present) add(own, request.step, *present);
  const auto& known = present ? own.sums : own.made_sums;
  if (known.step != request.step) {
    throw InvalidArgument("the sums of step " + std::to_string(request.step) +
                          " were applied and are gone; join again");
  }
  consume(known.rows, known.partials);
}

TableShard::Rows TableShard::fetch(const FetchRows& request, size_t count, Deadline deadline) {
  auto& own = table(request.table);
  auto lock = lock_after(own, request.at_least, deadline);
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
      apply_together(own, apply, deadline);
    } else {
      apply_alone(own, rank, incarnation, apply);
    }
  }
}

bool TableShard::skip_to(uint64_t step, const Apply* command) {
  bool was_behind = false;
  for (const auto& own : tables_) {
    const auto lock = own->lock();
    if (own->steps() >= step) continue;
    was_behind = true;
    if (command != nullptr && own->has_all(step, command->members)) {
      make(*own, *command, command->members);
      continue;
    }
    own->sums.step = own->made_sums.step = 0;
    own->note_made(step);
  }
  return was_behind;
}

void TableShard::apply_together(Table& own, const Apply& apply, Deadline deadline) {
  auto lock = own.lock();
  const auto present = own.wait_for_pushes(lock, apply.step, apply.members, deadline);
  if (present) make(own, apply, *present);
}

void TableShard::make(Table& own, const Apply& apply, const std::vector<uint32_t>& members) const {
  add(own, apply.step, members);
  if (!members.empty()) step(own, apply, own.sums.rows, own.sums.runs);
  // A slow member asks for rows and partials alone.
  own.made_sums.step = apply.step;
  own.made_sums.rows.swap(own.sums.rows);
  own.made_sums.partials.swap(own.sums.partials);
  own.sums.step = 0;
  own.note_made(apply.step);
}

void TableShard::apply_alone(Table& own, uint32_t rank, uint64_t incarnation, const Apply& apply) {
  const auto lock = own.lock();
  const auto* const given = own.find_own(rank, incarnation, apply.step);
  if (given == nullptr) return;
  std::vector<Run> runs;
  for (const auto& part : given->parts) runs.emplace_back(part.rows, floats_of(part.values));
  step(own, apply, given->rows, runs);
  own.note_applied(rank, incarnation, apply.step);
}

void TableShard::step(Table& own, const Apply& apply, std::span<const int64_t> rows, std::span<const Run> runs) const {
  const auto index = static_cast<uint32_t>(&own.spec - plan_.tables.data());
  const bool is_used = !std::binary_search(apply.unused_tables.begin(), apply.unused_tables.end(), index);
  if (!is_used || apply.scalars.finite == 0 || apply.scalars.dropped != 0) return;
  const auto optimizer = row_optimizer_of(own.spec, apply.groups);
  const auto dim = static_cast<size_t>(own.spec.dim);
  const std::unique_lock writing(own.rows_mutex);
  size_t first = 0;
  for (const auto& [count, values] : runs) {
    own.rows.push(rows.subspan(first, count), {values, count * dim}, optimizer, static_cast<int64_t>(own.counted) + 1,
                  apply.scalars);
    first += count;
  }
  ++own.counted;
}

std::vector<uint64_t> TableShard::steps(uint32_t rank, uint64_t incarnation) {
  std::vector<uint64_t> steps;
  for (const auto& own : tables_) {
    const auto lock = own->lock();
    steps.push_back(own->step_of(rank, incarnation));
  }
  return steps;
}

void TableShard::drop_pushes(uint32_t rank) {
  for (const auto& own : tables_) {
    const auto lock = own->lock();
    own->drop(rank);
  }
}

void TableShard::wake() {
  for (const auto& own : tables_) {
    const auto lock = own->lock();
    own->wake();
  }
}

}  // namespace muster::server
