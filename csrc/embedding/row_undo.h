// What an image of a table needs of rows that change while it is copied.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

namespace muster {

/// The first `rows` places of a table as they were at one moment, copied in blocks of 2^block_bits rows while the table
/// goes on: rows that change before they are copied are saved here. Takes the memory of those rows alone, and gives it
/// back block by block. Externally synchronised.
class RowUndo {
 public:
  /// A row has `dim` values and `state_width` floats of state.
  RowUndo(int64_t rows, int block_bits, int64_t dim, int64_t state_width);

  /// Where the next block begins, and how many rows it has: none once all were copied.
  int64_t next() const noexcept { return next_; }
  int64_t count() const noexcept;

  /// Saves a row that is about to change, if the image still needs it and does not have it yet.
  void save(int64_t place, const float* values, const float* state);

  /// Puts what was saved of the next block over a copy of the block as it is, and goes on to the one after.
  void finish_block(std::span<float> values, std::span<float> states);

 private:
  using SavedRows = std::unordered_map<int64_t, std::unique_ptr<float[]>>;  // by place: values, then state

  int64_t rows_;
  int block_bits_;
  size_t dim_;
  size_t state_width_;
  int64_t next_ = 0;
  std::vector<SavedRows> saved_;  // by block
};

}  // namespace muster
