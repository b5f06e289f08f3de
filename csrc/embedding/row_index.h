// An index of the rows of a table: a hash table with what a table of rows needs, and no more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace muster {

/// From row numbers, which are not negative, to 0, 1, 2, ... in the order of insertion. Nothing is ever taken out. Open
/// addressing with linear probing, at most 2/3 full; a table that gets fuller doubles. 24 to 56 bytes a row. `find` and
/// `prefetch` may be called by several threads at once while nobody inserts.
class RowIndex {
 public:
  RowIndex() : entries_(kFirstCapacity), shift_(64 - kFirstBits) {}

  int64_t size() const noexcept { return static_cast<int64_t>(rows_.size()); }

  /// The row at a place below size().
  int64_t row_at(int64_t place) const noexcept { return rows_[static_cast<size_t>(place)]; }

  /// Brings the place of `row` into the cache.
  void prefetch(int64_t row) const noexcept { __builtin_prefetch(&entries_[home(row)]); }

  /// The place of `row`; -1 where it was not inserted.
  int64_t find(int64_t row) const noexcept {
    const Entry& entry = entries_[probe(row)];
    return entry.row == row ? entry.place : -1;
  }

  /// The place of `row`, which is size() before the call where it is inserted.
  int64_t insert(int64_t row) {
    Entry* entry = &entries_[probe(row)];
    if (entry->row == row) return entry->place;
    if (rows_.size() + 1 > entries_.size() / 3 * 2) {
      grow();
      entry = &entries_[probe(row)];
    }
    const int64_t place = size();
    rows_.push_back(row);
    *entry = {row, place};
    return place;
  }

 private:
  static constexpr int kFirstBits = 6;
  static constexpr size_t kFirstCapacity = size_t{1} << kFirstBits;

  struct Entry {
    int64_t row = -1;
    int64_t place = -1;
  };

  // Fibonacci hashing (Knuth, The Art of Computer Programming 3, 6.4): rows that follow one another, or differ by the
  // number of servers, are spread evenly.
  size_t home(int64_t row) const noexcept { return (static_cast<uint64_t>(row) * 0x9e3779b97f4a7c15ULL) >> shift_; }

  // Of the entry that holds the row, or would.
  size_t probe(int64_t row) const noexcept {
    size_t i = home(row);
    while (entries_[i].row != row && entries_[i].row >= 0) i = (i + 1) & (entries_.size() - 1);
    return i;
  }

  void grow() {
    std::vector<Entry> before(entries_.size() * 2);
    before.swap(entries_);
    --shift_;
    for (const Entry& entry : before) {
      if (entry.row >= 0) entries_[probe(entry.row)] = entry;
    }
  }

  std::vector<Entry> entries_;
  int shift_;
  std::vector<int64_t> rows_;  // by place
};

}  // namespace muster
