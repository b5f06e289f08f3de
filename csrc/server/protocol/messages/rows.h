// Rows of tables, pushed, pulled, written and read.
// Tables are named by their index in the plan, rows by their number in the table. A server is sent the rows alone that
// it has. Payloads are arrays, one after the other, of as many rows as fit: i64 numbers, then what each message says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "server/protocol/messages/bounds.h"
#include "server/protocol/plan.h"
#include "server/protocol/wire.h"

namespace muster::server {

/// Of a part with so many bytes a row.
inline constexpr size_t rows_a_part(size_t row_bytes) noexcept {
  constexpr size_t kPartBytes = size_t{2} << 20;
  return row_bytes < kPartBytes ? kPartBytes / row_bytes : 1;
}

/// A part of one worker's sums of a table in a step: row numbers and f32 sums of `dim` values a row. Rows of a stripe
/// (RowStripes) ascend strictly over all parts, and in a part those of a lower stripe come first. Parts come in order;
/// a step without rows has one, empty. The answer is Pushed.
struct PushRows {
  static constexpr uint16_t kType = 28;
  uint64_t step = 0;
  uint32_t table = 0;
  uint32_t part = 0;
  uint32_t parts = 1;  ///< of the push

  static constexpr auto kFields = fields(&PushRows::step, &PushRows::table, &PushRows::part, &PushRows::parts);
};

/// Asks for values of rows (the payload: numbers in any order, which may repeat; best by stripe), once those have made
/// `at_least` steps. `shares` and `place` as in Read. The answer is Values.
struct PullRows {
  static constexpr uint16_t kType = 29;
  uint32_t table = 0;
  uint64_t at_least = 0;
  bool shares = false;
  uint64_t place = 0;

  static constexpr auto kFields = fields(&PullRows::table, &PullRows::at_least, &PullRows::shares, &PullRows::place);
};

/// The chief's: row numbers, f32 values and f32 states, before Start.
struct WriteRows {
  static constexpr uint16_t kType = 30;
  uint32_t table = 0;

  static constexpr auto kFields = fields(&WriteRows::table);
};

/// Likewise: how many steps the table's optimizer has counted.
struct WriteRowSteps {
  static constexpr uint16_t kType = 31;
  uint32_t table = 0;
  uint64_t steps = 0;

  static constexpr auto kFields = fields(&WriteRowSteps::table, &WriteRowSteps::steps);
};

/// Asks for the rows of a stripe that the server keeps, from the `first`-th on, in an order that does not change but
/// grows, once the stripe has made `at_least` steps.
struct FetchRows {
  static constexpr uint16_t kType = 32;
  uint32_t table = 0;
  uint32_t stripe = 0;
  uint64_t at_least = 0;
  uint64_t first = 0;

  static constexpr auto kFields =
      fields(&FetchRows::table, &FetchRows::stripe, &FetchRows::at_least, &FetchRows::first);
};

/// Row numbers, f32 values and f32 states.
struct FetchedRows {
  static constexpr uint16_t kType = 33;
  uint64_t total = 0;  ///< rows of the stripe that the server keeps
  uint64_t steps = 0;  ///< that the table's optimizer has counted there

  static constexpr auto kFields = fields(&FetchedRows::total, &FetchedRows::steps);
};

}  // namespace muster::server
