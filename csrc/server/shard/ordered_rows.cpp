#include "server/shard/ordered_rows.h"

#include <ATen/ops/empty.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <system_error>
#include <utility>

#include "checkpoint/file.h"
#include "muster/error.h"

namespace muster::server {

namespace {

namespace fs = std::filesystem;

template <class T>
std::span<T> elements(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr<T>(), static_cast<size_t>(tensor.numel())};
}

[[noreturn]] void refuse_file(const fs::path& path, const std::string& why) {
  throw CheckpointError("cannot read '" + path.string() + "': " + why + "; save again");
}

class RowsOfCut final : public OrderedRows {
 public:
  RowsOfCut(const Shard& shard, uint32_t table, const std::vector<uint64_t>& rows_of)
      : tables_(shard.tables()), table_(table), stripes_(rows_of.size()) {
    rows_.reserve(std::accumulate(rows_of.begin(), rows_of.end(), size_t{0}));
    for (uint32_t s = 0; s < rows_of.size(); ++s) {
      const auto own = tables_.stripe(table_, s).first_rows(rows_of[s]);
      rows_.insert(rows_.end(), own.begin(), own.end());
    }
    std::ranges::sort(rows_);
  }

  uint64_t total() const override { return rows_.size(); }
  uint64_t begin() const override { return 0; }
  uint64_t count() const override { return rows_.size(); }

  RowBlock next(int64_t most) override {
    const size_t count = std::min(rows_.size() - next_, static_cast<size_t>(most));
    const auto& first = tables_.stripe(table_, 0);
    auto block = RowBlock::empty(static_cast<int64_t>(count), first.spec.dim, first.rows.state_width());
    std::copy_n(rows_.data() + next_, count, elements<int64_t>(block.rows).data());
    next_ += count;
    for (size_t i = 0; i < count; ++i) {
      stripes_[tables_.stripe_of(table_, elements<int64_t>(block.rows)[i])].push_back(i);
    }
    for (uint32_t s = 0; s < stripes_.size(); ++s) copy_stripe(s, block);
    return block;
  }

 private:
  void copy_stripe(uint32_t stripe, const RowBlock& block) {
    const auto places = std::exchange(stripes_[stripe], {});
    if (places.empty()) return;
    const auto count = static_cast<int64_t>(places.size());
    const auto own = RowBlock::empty(count, block.values.size(1), block.states.size(1));
    const auto numbers = elements<int64_t>(own.rows);
    for (size_t i = 0; i < places.size(); ++i) numbers[i] = elements<int64_t>(block.rows)[places[i]];
    const auto values = elements<float>(own.values);
    const auto states = elements<float>(own.states);
    tables_.stripe(table_, stripe).copy_cut(numbers, values, states);
    const auto dim = static_cast<size_t>(block.values.size(1));
    const auto width = static_cast<size_t>(block.states.size(1));
    for (size_t i = 0; i < places.size(); ++i) {
      std::copy_n(values.data() + i * dim, dim, elements<float>(block.values).data() + places[i] * dim);
      std::copy_n(states.data() + i * width, width, elements<float>(block.states).data() + places[i] * width);
    }
  }

  const TableShard& tables_;
  const uint32_t table_;
  std::vector<int64_t> rows_;
  std::vector<std::vector<size_t>> stripes_;  // of a block, by stripe: places of its rows
  size_t next_ = 0;
};

// Records of a file from one on, up to another one.
class RowRecords {
 public:
  RowRecords(fs::path path, size_t bytes) : path_(std::move(path)), bytes_(bytes) {
    fd_ = net::FileDescriptor(::open(path_.c_str(), O_RDONLY | O_CLOEXEC));
    struct stat status{};
    if (!fd_ || ::fstat(fd_.get(), &status) != 0) {
      refuse_file(path_, std::error_code(errno, std::generic_category()).message());
    }
    const auto size = static_cast<uint64_t>(status.st_size);
    if (size % bytes_ != 0) refuse_file(path_, "it is cut short");
    count_ = last_ = size / bytes_;
  }

  uint64_t count() const noexcept { return count_; }

  int64_t row_at(uint64_t record) {
    int64_t row = 0;
    read(record * bytes_, reinterpret_cast<std::byte*>(&row), sizeof(row));
    return row;
  }

  /// The first record whose row is not below.
  uint64_t lower_bound(int64_t row) {
    uint64_t low = 0;
    uint64_t high = count_;
    while (low < high) {
      const uint64_t middle = low + (high - low) / 2;
      if (row_at(middle) < row) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  void limit(uint64_t first, uint64_t last) noexcept {
    next_ = first;
    last_ = last;
  }

  bool is_at_end() const noexcept { return next_ == last_; }
  int64_t row() {
    fill();
    int64_t row = 0;
    std::memcpy(&row, buffer_.data() + offset_, sizeof(row));
    return row;
  }
  const std::byte* floats() const noexcept { return buffer_.data() + offset_ + sizeof(int64_t); }
  void advance() noexcept {
    ++next_;
    offset_ += bytes_;
  }

 private:
  void fill() {
    constexpr size_t kBuffer = size_t{1} << 20;
    if (offset_ < buffer_.size()) return;
    const auto records = std::min<uint64_t>(std::max<size_t>(kBuffer / bytes_, 1), last_ - next_);
    buffer_.resize(records * bytes_);
    read(next_ * bytes_, buffer_.data(), buffer_.size());
    offset_ = 0;
  }

  void read(uint64_t place, std::byte* to, size_t bytes) {
    while (bytes > 0) {
      const auto got = ::pread(fd_.get(), to, bytes, static_cast<off_t>(place));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) refuse_file(path_, std::error_code(errno, std::generic_category()).message());
      if (got == 0) refuse_file(path_, "it is cut short");
      place += static_cast<uint64_t>(got);
      to += got;
      bytes -= static_cast<size_t>(got);
    }
  }

  fs::path path_;
  size_t bytes_;  // of a record
  net::FileDescriptor fd_;
  uint64_t count_ = 0;
  uint64_t next_ = 0;
  uint64_t last_ = 0;
  std::vector<std::byte> buffer_;
  size_t offset_ = 0;  // of the next record in it
};

class MergedRows final : public OrderedRows {
 public:
  MergedRows(const std::vector<fs::path>& files, size_t part, int64_t dim, int64_t width) : dim_(dim), width_(width) {
    for (const auto& file : files) sources_.emplace_back(file, sizeof(int64_t) + float_bytes());
    auto& largest = *std::ranges::max_element(sources_, {}, &RowRecords::count);
    const auto first_of = [&](size_t p) -> std::optional<int64_t> {
      const uint64_t record = largest.count() * p / files.size();
      if (p == 0 || largest.count() == 0) return std::numeric_limits<int64_t>::min();
      return p == files.size() ? std::nullopt : std::optional(largest.row_at(record));
    };
    const auto low = first_of(part);
    const auto high = first_of(part + 1);
    for (auto& source : sources_) {
      const auto first = source.lower_bound(low.value_or(std::numeric_limits<int64_t>::min()));
      const auto last = high ? source.lower_bound(*high) : source.count();
      total_ += source.count();
      begin_ += first;
      count_ += last - first;
      source.limit(first, last);
      if (first < last) heap_.push_back(&source);
    }
    std::ranges::make_heap(heap_, comes_later);
  }

  uint64_t total() const override { return total_; }
  uint64_t begin() const override { return begin_; }
  uint64_t count() const override { return count_; }

  RowBlock next(int64_t most) override {
    const auto count = static_cast<int64_t>(std::min(count_ - given_, static_cast<uint64_t>(most)));
    auto block = RowBlock::empty(count, dim_, width_);
    auto* rows = elements<int64_t>(block.rows).data();
    auto* values = elements<float>(block.values).data();
    auto* states = elements<float>(block.states).data();
    const size_t value_bytes = static_cast<size_t>(dim_) * sizeof(float);
    for (int64_t i = 0; i < count; ++i, values += dim_, states += width_) {
      std::ranges::pop_heap(heap_, comes_later);
      auto& source = *heap_.back();
      rows[i] = source.row();
      std::memcpy(values, source.floats(), value_bytes);
      if (width_ > 0) std::memcpy(states, source.floats() + value_bytes, float_bytes() - value_bytes);
      source.advance();
      if (source.is_at_end()) {
        heap_.pop_back();
      } else {
        std::ranges::push_heap(heap_, comes_later);
      }
    }
    given_ += static_cast<uint64_t>(count);
    return block;
  }

 private:
  static bool comes_later(RowRecords* a, RowRecords* b) { return a->row() > b->row(); }
  size_t float_bytes() const { return static_cast<size_t>(dim_ + width_) * sizeof(float); }

  int64_t dim_;
  int64_t width_;
  std::vector<RowRecords> sources_;
  std::vector<RowRecords*> heap_;  // that have rows left; the first has the least
  uint64_t total_ = 0;
  uint64_t begin_ = 0;
  uint64_t count_ = 0;
  uint64_t given_ = 0;
};

}  // namespace

RowBlock RowBlock::empty(int64_t count, int64_t dim, int64_t width) {
  return {at::empty({count}, at::kLong), at::empty({count, dim}, at::kFloat), at::empty({count, width}, at::kFloat)};
}

std::unique_ptr<OrderedRows> rows_of_cut(const Shard& shard, uint32_t table, const std::vector<uint64_t>& rows_of) {
  return std::make_unique<RowsOfCut>(shard, table, rows_of);
}

void write_rows(const fs::path& path, OrderedRows& rows, int64_t at_once, const std::function<void()>& check) {
  const fs::path unfinished = path.string() + ".unfinished";
  checkpoint::FileWriter file(unfinished);
  std::vector<std::byte> records;
  for (auto block = rows.next(at_once); block.count() > 0; block = rows.next(at_once)) {
    const std::span<const std::byte> arrays[] = {std::as_bytes(elements<int64_t>(block.rows)),
                                                 std::as_bytes(elements<float>(block.values)),
                                                 std::as_bytes(elements<float>(block.states))};
    records.clear();
    for (size_t i = 0; i < static_cast<size_t>(block.count()); ++i) {
      for (const auto& array : arrays) {
        const size_t bytes = array.size() / static_cast<size_t>(block.count());
        const auto one = array.subspan(i * bytes, bytes);
        records.insert(records.end(), one.begin(), one.end());
      }
    }
    file.write(records.data(), records.size());
    check();
  }
  file.finish();
  fs::rename(unfinished, path);
}

std::unique_ptr<OrderedRows> merge_rows(const std::vector<fs::path>& files, size_t part, int64_t dim, int64_t width) {
  return std::make_unique<MergedRows>(files, part, dim, width);
}

}  // namespace muster::server
