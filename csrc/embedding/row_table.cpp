#include "embedding/row_table.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <functional>
#include <string>
#include <utility>

#include "core/pages.h"
#include "muster/error.h"

namespace muster {

namespace {

constexpr size_t kSlabBytes = size_t{4} << 20;
constexpr size_t kSlabsOfOrdinaryPages = 4;  // a table's first
constexpr size_t kCacheLine = 64;
// Rows whose memory is on its way at the same time.
constexpr size_t kBatch = 32;
// Of a row; a longer one is brought along by the hardware.
constexpr size_t kPrefetchedLines = 8;

int64_t state_width_of(const kernels::SgdGroup&, int64_t) { return 0; }
int64_t state_width_of(const kernels::AdagradGroup&, int64_t dim) { return dim; }
int64_t state_width_of(const kernels::AdamGroup& group, int64_t dim) { return (group.amsgrad ? 3 : 2) * dim; }
int64_t state_width_of(const kernels::RowwiseAdagradGroup&, int64_t) { return 1; }

bool moves_all_rows(const kernels::SgdGroup& group) { return group.momentum != 0 || group.weight_decay != 0; }
bool moves_all_rows(const kernels::AdagradGroup& group) { return group.weight_decay != 0; }
bool moves_all_rows(const kernels::AdamGroup&) { return false; }
bool moves_all_rows(const kernels::RowwiseAdagradGroup&) { return false; }

void step_rows(const kernels::StepArguments& arguments, const kernels::SgdGroup& group) noexcept {
  kernels::sgd_step(arguments, &group);
}
void step_rows(const kernels::StepArguments& arguments, const kernels::AdagradGroup& group) noexcept {
  kernels::adagrad_step(arguments, &group);
}
void step_rows(const kernels::StepArguments& arguments, const kernels::AdamGroup& group) noexcept {
  kernels::adam_step(arguments, &group);
}
void step_rows(const kernels::StepArguments& arguments, const kernels::RowwiseAdagradGroup& group) noexcept {
  kernels::rowwise_adagrad_step(arguments, &group);
}

void prefetch(const float* data, int64_t count) noexcept {
  const size_t bytes = std::min(static_cast<size_t>(count) * sizeof(float), kPrefetchedLines * kCacheLine);
  for (size_t b = 0; b < bytes; b += kCacheLine) __builtin_prefetch(reinterpret_cast<const char*>(data) + b);
}

void copy(std::span<float> to, const float* from) noexcept {
  if (!to.empty()) std::memcpy(to.data(), from, to.size_bytes());
}

int64_t checked_state_width(const RowOptimizer& optimizer, int64_t dim) {
  return std::visit(
      [&](const auto& group) {
        if (moves_all_rows(group)) {
          throw InvalidArgument(
              "momentum, and but for Adam weight decay, move every row of a sparse embedding at every step; set both "
              "to 0, or take Adam");
        }
        return state_width_of(group, dim);
      },
      optimizer);
}

}  // namespace

// Values of all its rows, then their states: a pull touches values alone. Those of large tables are on huge pages where
// there are any, since rows are read at random.
class RowTable::Slab {
 public:
  Slab(size_t floats, bool is_of_large_table)
      : memory_(allocate_pages(floats * sizeof(float), is_of_large_table ? Pages::huge : Pages::ordinary)) {}

  float* data() const noexcept { return reinterpret_cast<float*>(memory_.get()); }

 private:
  PagesMemory memory_;
};

RowTable::RowTable(int64_t num_rows, int64_t dim, const RowInitialiser& initialiser, const RowOptimizer& optimizer)
    : num_rows_(num_rows), dim_(dim), initialiser_(initialiser), optimizer_(optimizer.index()) {
  constexpr int64_t kMaxDim = int64_t{1} << 24;
  if (num_rows < 1 || dim < 1 || dim > kMaxDim) {
    throw InvalidArgument("a table of " + std::to_string(num_rows) + " rows of " + std::to_string(dim) +
                          " values: both must be positive, and a row has at most 2^24 values");
  }
  state_width_ = checked_state_width(optimizer, dim);
  const auto row_bytes = static_cast<size_t>(dim_ + state_width_) * sizeof(float);
  slab_bits_ = std::bit_width(std::max<size_t>(kSlabBytes / row_bytes, 1)) - 1;
}

RowTable::~RowTable() = default;
RowTable::RowTable(RowTable&&) noexcept = default;
RowTable& RowTable::operator=(RowTable&&) noexcept = default;

void RowTable::check_rows(std::span<const int64_t> rows) const {
  for (const int64_t row : rows) {
    if (row >= 0 && row < num_rows_) continue;
    throw InvalidArgument("row " + std::to_string(row) + " is not in [0, " + std::to_string(num_rows_) +
                          "): the embedding has so many rows");
  }
}

void RowTable::check_spans(size_t rows, size_t values, size_t states) const {
  if (values == rows * static_cast<size_t>(dim_) && states == rows * static_cast<size_t>(state_width_)) return;
  throw InvalidArgument(std::to_string(rows) + " rows of " + std::to_string(dim_) + " values and " +
                        std::to_string(state_width_) + " of state came with " + std::to_string(values) + " and " +
                        std::to_string(states) + "; give all of each row");
}

void RowTable::check_range(int64_t first, size_t count) const {
  if (first >= 0 && first <= size() && static_cast<int64_t>(count) <= size() - first) return;
  throw InvalidArgument("the table holds " + std::to_string(size()) + " rows, not " + std::to_string(first) + " + " +
                        std::to_string(count));
}

RowTable::Row RowTable::at(int64_t place) const noexcept {
  const int64_t rows = int64_t{1} << slab_bits_;
  float* const data = slabs_[static_cast<size_t>(place >> slab_bits_)].data();
  const int64_t i = place & (rows - 1);
  return {data + i * dim_, data + rows * dim_ + i * state_width_};
}

RowTable::Row RowTable::insert(int64_t row) {
  const int64_t before = index_.size();
  if ((before >> slab_bits_) == static_cast<int64_t>(slabs_.size())) {
    // A huge page takes memory as a whole: of a small table, or a stripe, most of it would have no rows.
    slabs_.emplace_back(static_cast<size_t>(dim_ + state_width_) << slab_bits_, slabs_.size() >= kSlabsOfOrdinaryPages);
  }
  const int64_t place = index_.insert(row);
  const Row found = at(place);
  if (place == before) {
    initialiser_.fill(row, {found.values, static_cast<size_t>(dim_)});
    std::fill_n(found.state, state_width_, 0.0F);
    return found;
  }
  if (image_) image_->save(place, found.values, found.state);
  if (cut_) cut_->save(row, place, found.values, found.state);
  return found;
}

void RowTable::pull(std::span<const int64_t> rows, std::span<float> values) const {
  check_spans(rows.size(), values.size(), rows.size() * static_cast<size_t>(state_width_));
  check_rows(rows);
  const auto dim = static_cast<size_t>(dim_);
  std::array<const float*, kBatch> sources{};
  for (size_t i = 0; i < std::min(kBatch, rows.size()); ++i) index_.prefetch(rows[i]);
  for (size_t begin = 0; begin < rows.size(); begin += kBatch) {
    const size_t end = std::min(begin + kBatch, rows.size());
    for (size_t i = end; i < std::min(end + kBatch, rows.size()); ++i) index_.prefetch(rows[i]);
    for (size_t i = begin; i < end; ++i) {
      const int64_t place = index_.find(rows[i]);
      const float* const source = place < 0 ? nullptr : at(place).values;
      if (source != nullptr) prefetch(source, dim_);
      sources[i - begin] = source;
    }
    for (size_t i = begin; i < end; ++i) {
      const auto target = values.subspan(i * dim, dim);
      if (sources[i - begin] != nullptr) {
        copy(target, sources[i - begin]);
      } else {
        initialiser_.fill(rows[i], target);
      }
    }
  }
}

void RowTable::push(std::span<const int64_t> rows, std::span<const float> gradients, const RowOptimizer& optimizer,
                    int64_t step, const kernels::StepScalars& scalars) {
  check_spans(rows.size(), gradients.size(), rows.size() * static_cast<size_t>(state_width_));
  check_rows(rows);
  if (std::adjacent_find(rows.begin(), rows.end(), std::greater_equal<>()) != rows.end()) {
    throw InvalidArgument("rows of a push must ascend, each coming once; sum the gradients of each row first");
  }
  if (optimizer.index() != optimizer_ || checked_state_width(optimizer, dim_) != state_width_ || step < 1) {
    throw InvalidArgument("a table's optimizer cannot change, and its steps count from 1; keep the kind that it has");
  }
  if (scalars.finite == 0 || scalars.dropped != 0) return;
  const auto dim = static_cast<size_t>(dim_);
  const size_t states = (static_cast<size_t>(state_width_) + dim - 1) / dim;
  const auto count = static_cast<float>(step);
  std::array<kernels::StepSegment, kBatch> segments{};
  for (size_t i = 0; i < std::min(kBatch, rows.size()); ++i) index_.prefetch(rows[i]);
  for (size_t begin = 0; begin < rows.size(); begin += kBatch) {
    const size_t end = std::min(begin + kBatch, rows.size());
    for (size_t i = end; i < std::min(end + kBatch, rows.size()); ++i) index_.prefetch(rows[i]);
    for (size_t i = begin; i < end; ++i) {
      const Row row = insert(rows[i]);
      prefetch(row.values, dim_);
      prefetch(row.state, state_width_);
      auto& segment = segments[i - begin];
      segment.gradient = const_cast<float*>(gradients.data() + i * dim);  // read alone: keep_gradient is off
      segment.parameter = row.values;
      for (size_t s = 0; s < states; ++s) segment.state[s] = row.state + s * dim;
      segment.step = &count;
      segment.n = dim;
    }
    const kernels::StepArguments arguments{kernels::DType::f32, segments.data(), end - begin, &scalars, false};
    std::visit([&](const auto& group) { step_rows(arguments, group); }, optimizer);
  }
}

void RowTable::export_rows(int64_t first, std::span<int64_t> rows, std::span<float> values,
                           std::span<float> states) const {
  check_spans(rows.size(), values.size(), states.size());
  check_range(first, rows.size());
  const auto dim = static_cast<size_t>(dim_);
  const auto width = static_cast<size_t>(state_width_);
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto place = first + static_cast<int64_t>(i);
    const Row row = at(place);
    rows[i] = index_.row_at(place);
    copy(values.subspan(i * dim, dim), row.values);
    copy(states.subspan(i * width, width), row.state);
  }
}

void RowTable::import_rows(std::span<const int64_t> rows, std::span<const float> values,
                           std::span<const float> states) {
  check_spans(rows.size(), values.size(), states.size());
  check_rows(rows);
  const auto dim = static_cast<size_t>(dim_);
  const auto width = static_cast<size_t>(state_width_);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row row = insert(rows[i]);
    copy({row.values, dim}, values.data() + i * dim);
    copy({row.state, width}, states.data() + i * width);
  }
}

int64_t RowTable::begin_image() {
  if (image_) throw InvalidArgument("a table has one image at a time; end the one that was begun");
  image_ = std::make_unique<RowUndo>(size(), slab_bits_, dim_, state_width_);
  return size();
}

int64_t RowTable::image_block_rows() const noexcept { return image_ ? image_->count() : 0; }

void RowTable::copy_image_block(std::span<int64_t> rows, std::span<float> values, std::span<float> states) {
  if (static_cast<int64_t>(rows.size()) != image_block_rows() || rows.empty()) {
    throw InvalidArgument("the next block of a table's image has " + std::to_string(image_block_rows()) +
                          " rows; ask for as many");
  }
  export_rows(image_->next(), rows, values, states);
  image_->finish_block(values, states);
}

int64_t RowTable::begin_cut() {
  if (cut_) throw InvalidArgument("a table has one cut at a time; end the one that was begun");
  cut_ = std::make_unique<RowCut>(size(), dim_, state_width_);
  return size();
}

void RowTable::export_numbers(int64_t first, std::span<int64_t> rows) const {
  check_range(first, rows.size());
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = index_.row_at(first + static_cast<int64_t>(i));
}

void RowTable::copy_cut(std::span<const int64_t> rows, std::span<float> values, std::span<float> states) {
  check_spans(rows.size(), values.size(), states.size());
  const auto dim = static_cast<size_t>(dim_);
  const auto width = static_cast<size_t>(state_width_);
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t place = cut_ ? index_.find(rows[i]) : -1;
    if (!cut_ || !cut_->has(place)) {
      throw InvalidArgument("row " + std::to_string(rows[i]) + " is in no cut; begin one, of its rows");
    }
    const Row row = at(place);
    const auto to = values.subspan(i * dim, dim);
    const auto state = states.subspan(i * width, width);
    copy(to, row.values);
    copy(state, row.state);
    cut_->finish(rows[i], place, to, state);
  }
}

}  // namespace muster
