#include "server/shard/held_table.h"

#include <algorithm>
#include <array>
#include <mutex>
#include <span>
#include <utility>

#include "kernels/kernels.h"

namespace muster::server {

namespace {

const float* floats_of(Bytes bytes) { return reinterpret_cast<const float*>(bytes.data()); }

// Goes through a contribution row by row.
class Cursor {
 public:
  Cursor(uint32_t rank, const WorkerSums& given) : rank_(rank), given_(&given) { skip_ends(); }

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
  const WorkerSums* given_;
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

HeldTable::HeldTable(const TableSpec& spec, uint32_t stripe, const Plan& plan, Steps& rules)
    : HeldSums(rules), spec(spec), stripe(stripe), rows(empty_table(spec, plan.groups)), plan_(plan) {}

kernels::NormSum HeldTable::add(uint64_t step, const std::vector<uint32_t>& members) {
  summed_.clear();
  runs_.clear();
  const auto dim = static_cast<size_t>(spec.dim);
  if (members.size() == 1) {
    const auto& given = *find(step, members.front());
    summed_ = given.rows;
    for (const auto& part : given.parts) runs_.emplace_back(part.rows, floats_of(part.values));
  } else if (!members.empty()) {
    std::vector<Cursor> heap;
    for (const uint32_t rank : members) {
      const Cursor cursor(rank, *find(step, rank));
      if (!cursor.is_at_end()) heap.push_back(cursor);
    }
    std::make_heap(heap.begin(), heap.end(), Cursor::comes_later);
    RowAdder adder(dim, members.back() + 1, values_);
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
      summed_.push_back(row);
    }
    adder.flush();
    runs_.emplace_back(summed_.size(), values_.data());
  }
  return norm_of_sums();
}

kernels::NormSum HeldTable::norm_of_sums() const {
  constexpr size_t kRowsAtOnce = 64;
  const auto dim = static_cast<size_t>(spec.dim);
  const size_t tiles = kernels::num_tiles(dim);
  std::vector<double> partials(kRowsAtOnce * tiles);
  std::array<kernels::StatsSegment, kRowsAtOnce> segments{};
  size_t count = 0;
  kernels::NormSum norm;
  const auto add_rows = [&] {
    kernels::grad_stats(segments.data(), count, plan_.norm_type);
    for (size_t i = 0; i < count * tiles; ++i) kernels::add_partial(norm, partials[i], plan_.norm_type);
    count = 0;
  };
  for (const auto& [rows, values] : runs_) {
    for (size_t row = 0; row < rows; ++row) {
      segments[count] = {values + row * dim, partials.data() + count * tiles, dim, kernels::DType::f32};
      if (++count == segments.size()) add_rows();
    }
  }
  add_rows();
  return norm;
}

void HeldTable::step(const Apply& apply, const WorkerSums* given) {
  const auto index = static_cast<uint32_t>(&spec - plan_.tables.data());
  const bool is_used = !std::binary_search(apply.unused_tables.begin(), apply.unused_tables.end(), index);
  if (!is_used || apply.scalars.finite == 0 || apply.scalars.dropped != 0) return;
  std::vector<Run> alone;
  if (given != nullptr) {
    for (const auto& part : given->parts) alone.emplace_back(part.rows, floats_of(part.values));
  }
  const std::span<const int64_t> numbers(given != nullptr ? given->rows : summed_);
  const auto optimizer = row_optimizer_of(spec, apply.groups);
  const auto dim = static_cast<size_t>(spec.dim);
  const std::unique_lock writing(rows_mutex);
  size_t first = 0;
  for (const auto& [count, values] : given != nullptr ? alone : runs_) {
    rows.push(numbers.subspan(first, count), {values, count * dim}, optimizer, static_cast<int64_t>(counted) + 1,
              apply.scalars);
    first += count;
  }
  ++counted;
}

}  // namespace muster::server
