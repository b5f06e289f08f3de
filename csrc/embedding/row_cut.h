// What an image of a table that is copied in the order of row numbers needs of rows that change meanwhile.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace muster {

/// The first `rows` places of a table as they were at one moment, copied by ascending row numbers while the table goes
/// on: rows that change before they are copied are saved here. Takes the memory of those rows, and 8 bytes for each of
/// the 4,096 places around one. No call moves what others have saved. Externally synchronised.
class RowCut {
 public:
  /// A row has `dim` values and `state_width` floats of state.
  RowCut(int64_t rows, int64_t dim, int64_t state_width)
      : rows_(rows),
        dim_(static_cast<size_t>(dim)),
        state_width_(static_cast<size_t>(state_width)),
        pages_(static_cast<size_t>((rows + kPage - 1) / kPage)) {}

  /// Whether there was a row at a place.
  bool has(int64_t place) const noexcept { return place >= 0 && place < rows_; }

  /// Saves a row that is about to change, if the image still needs it and does not have it yet.
  void save(int64_t row, int64_t place, const float* values, const float* state);

  /// Puts what was saved of a row over a copy of it as it is, and goes on to the rows after it.
  void finish(int64_t row, int64_t place, std::span<float> values, std::span<float> state);

 private:
  static constexpr int64_t kPage = 4096;
  using Saved = std::unique_ptr<float[]>;  // values, then state

  int64_t rows_;
  size_t dim_;
  size_t state_width_;
  int64_t next_ = 0;                                              // rows below are copied
  std::vector<std::unique_ptr<std::array<Saved, kPage>>> pages_;  // by place
};

}  // namespace muster
