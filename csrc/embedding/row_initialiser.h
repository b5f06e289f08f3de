// The values of rows of an embedding before anything was learnt.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>

#include "embedding/table_contents.h"
#include "muster/row_placement.h"

namespace muster {

struct ShardedEmbeddingOptions;

/// Values of a row follow from (seed, row) alone, so that they depend neither on the number of servers nor on who
/// touches what first: Philox4x32-10 (Salmon et al. 2011) with the seed as key and the row as the counter's upper half;
/// normal ones through the inverse distribution (Wichura 1988, AS 241's PPND7; relative error 1.2e-7) of + - * / sqrt
/// only, so that they are the same on every CPU. A value. Thread-safe.
struct RowInitialiser {
  enum class Kind : uint8_t {
    normal,  ///< of mean 0 and standard deviation `scale`
    uniform  ///< in (-scale, scale)
  };

  Kind kind = Kind::normal;
  double scale = 1;
  uint64_t seed = 0;

  void fill(int64_t row, std::span<float> values) const noexcept;

  /// Fills a contiguous fp32 matrix on the CPU with rows `first`, `first` + 1, ...
  void fill_rows(const at::Tensor& values, int64_t first = 0) const;

  bool operator==(const RowInitialiser&) const = default;
};

/// What an embedding says of its rows: where they are on servers, and how they are stepped. A value.
struct EmbeddingRows {
  RowInitialiser initialiser;
  RowPlacement placement = RowPlacement::modulo;
  bool row_wise_adagrad = false;
  /// Of a stub: what servers begin with, of a checkpoint; null: all rows are the initialiser's.
  std::shared_ptr<const TableContents> contents = nullptr;
};

/// Of an embedding whose seed is known.
EmbeddingRows rows_of(const ShardedEmbeddingOptions& options);

}  // namespace muster
