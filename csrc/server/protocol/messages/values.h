// What a server holds, given and read.
#pragma once

#include <cstdint>

#include "server/protocol/wire.h"

namespace muster::server {

/// What a chunk has besides its parameters.
enum class Part : uint8_t { parameter, state0, state1, state2, master, steps };
template <>
struct LastOf<Part> {
  static constexpr auto kValue = Part::steps;
};

/// The chief's initial values; the payload is the part of the whole chunk. Part::steps: an fp32 count a piece.
struct Write {
  static constexpr uint16_t kType = 6;
  uint32_t chunk = 0;
  Part part = Part::parameter;

  static constexpr auto kFields = fields(&Write::chunk, &Write::part);
};

/// Asks for a part, once the chunk has made `at_least` steps. With `shares` it is written to `place` of the memory that
/// the worker shares.
struct Read {
  static constexpr uint16_t kType = 7;
  uint32_t chunk = 0;
  Part part = Part::parameter;
  uint64_t at_least = 0;
  bool shares = false;
  uint64_t place = 0;

  static constexpr auto kFields = fields(&Read::chunk, &Read::part, &Read::at_least, &Read::shares, &Read::place);
};

/// The payload is the part; it is empty where the chunk has no such state. To PullRows: values in the order of the
/// rows.
struct Values {
  static constexpr uint16_t kType = 8;
  uint32_t chunk = 0;  ///< or table
  uint64_t steps = 0;  ///< that it had made

  static constexpr auto kFields = fields(&Values::chunk, &Values::steps);
};

}  // namespace muster::server
