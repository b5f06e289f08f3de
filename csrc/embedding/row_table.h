// The rows of a sparse embedding that a server has, and their optimizer.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <variant>
#include <vector>

#include "embedding/row_cut.h"
#include "embedding/row_index.h"
#include "embedding/row_initialiser.h"
#include "embedding/row_undo.h"
#include "kernels/kernels.h"

namespace muster {

/// Hyperparameters of the rows' optimizer; which alternative says what is computed.
using RowOptimizer =
    std::variant<kernels::SgdGroup, kernels::AdagradGroup, kernels::AdamGroup, kernels::RowwiseAdagradGroup>;

/// Rows of fp32 values with their optimizer's state. A row takes memory once it is first pushed; one that was only
/// pulled is computed from the initialiser each time. Rows are never taken out.
///
/// A push steps each of its rows as kernels.h says, with the bits of a flat optimizer's sparse rows. Rows without a
/// gradient keep values and state, so that Adam is lazy (as torch.optim.SparseAdam: the step count is the optimizer's,
/// not the row's). What would move every row is refused: momentum, and but for Adam, weight decay.
///
/// An image of the rows as they are at one moment can be copied block by block, while pushes and imports go on between
/// blocks: what they change before it is copied is kept aside, row by row. A cut is another image, copied in the order
/// of row numbers; both may be under way.
///
/// Externally synchronised; pull, export_rows and the sizes may be called by several threads at once, and beside them
/// by one copy_image_block and one copy_cut, while nobody pushes, imports, or begins or ends an image or a cut.
class RowTable {
 public:
  /// Rows are numbered in [0, num_rows), whichever of them this server has. Throws InvalidArgument for sizes that are
  /// not positive, and for an optimizer that moves rows without a gradient.
  RowTable(int64_t num_rows, int64_t dim, const RowInitialiser& initialiser, const RowOptimizer& optimizer);
  ~RowTable();
  RowTable(RowTable&&) noexcept;
  RowTable& operator=(RowTable&&) noexcept;

  int64_t dim() const noexcept { return dim_; }
  /// State of a row, in floats: SGD 0, Adagrad dim (sum), Adam 2 dim (exp_avg, exp_avg_sq) or with amsgrad 3 dim
  /// (max_exp_avg_sq), row-wise Adagrad 1.
  int64_t state_width() const noexcept { return state_width_; }
  /// Rows that take memory.
  int64_t size() const noexcept { return index_.size(); }

  /// values: rows.size() * dim, in the order of `rows`, which may repeat. Throws InvalidArgument for a row outside the
  /// table.
  void pull(std::span<const int64_t> rows, std::span<float> values) const;

  /// Steps `rows`, strictly ascending, by their `gradients` (rows.size() * dim: sums over replicas) and `scalars`, as
  /// the optimizer's step number `step`, from 1. Several pushes may be of one step, each of other rows. Throws
  /// InvalidArgument, and changes nothing, for rows that repeat or lie outside the table, spans of another size, and
  /// another optimizer than the table was made for; its hyperparameters may change.
  void push(std::span<const int64_t> rows, std::span<const float> gradients, const RowOptimizer& optimizer,
            int64_t step, const kernels::StepScalars& scalars);

  /// Rows [first, first + rows.size()) in the order of their first push: their numbers, values (dim each) and states
  /// (state_width each). Throws InvalidArgument for spans that do not fit.
  void export_rows(int64_t first, std::span<int64_t> rows, std::span<float> values, std::span<float> states) const;

  /// Sets rows to what export_rows gave, of any table with the same dim and optimizer. Throws InvalidArgument for
  /// spans that do not fit and rows outside the table.
  void import_rows(std::span<const int64_t> rows, std::span<const float> values, std::span<const float> states);

  /// Begins an image of all rows that take memory, and returns how many they are. Throws InvalidArgument where one was
  /// begun that did not end.
  int64_t begin_image();
  bool has_image() const noexcept { return image_ != nullptr; }
  /// Rows of the image's next block, some megabytes; 0 where all were copied, or there is no image.
  int64_t image_block_rows() const noexcept;
  /// As export_rows, for as many rows as image_block_rows says: the image's next, as they were when it began.
  void copy_image_block(std::span<int64_t> rows, std::span<float> values, std::span<float> states);
  /// Forgets the image, whether all of it was copied or not.
  void end_image() noexcept { image_.reset(); }

  /// Begins a cut of all rows that take memory, and returns how many they are. Throws InvalidArgument where one was
  /// begun that did not end.
  int64_t begin_cut();
  /// Numbers of rows [first, first + rows.size()) in the order of their first push. Throws InvalidArgument where they
  /// are not so many.
  void export_numbers(int64_t first, std::span<int64_t> rows) const;
  /// Rows of the cut as they were when it began: values (dim each) and states (state_width each). `rows` ascend, over
  /// all calls, too. Throws InvalidArgument for spans that do not fit, and rows that take no memory.
  void copy_cut(std::span<const int64_t> rows, std::span<float> values, std::span<float> states);
  /// Forgets the cut, whether all of it was copied or not.
  void end_cut() noexcept { cut_.reset(); }

 private:
  class Slab;
  struct Row {
    float* values;
    float* state;
  };

  void check_rows(std::span<const int64_t> rows) const;
  void check_spans(size_t rows, size_t values, size_t states) const;
  void check_range(int64_t first, size_t count) const;
  Row at(int64_t place) const noexcept;
  /// Where a row is to be changed; inserts it where it takes no memory yet.
  Row insert(int64_t row);

  int64_t num_rows_;
  int64_t dim_;
  RowInitialiser initialiser_;
  size_t optimizer_;  // index of RowOptimizer
  int64_t state_width_;
  int slab_bits_;  // a slab has 2^slab_bits_ rows
  RowIndex index_;
  std::vector<Slab> slabs_;
  std::unique_ptr<RowUndo> image_;  // in blocks of a slab; null: none is under way
  std::unique_ptr<RowCut> cut_;     // likewise
};

}  // namespace muster
