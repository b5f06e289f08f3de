// What a chunk or a table held at one moment.
#pragma once

#include <cstdint>
#include <utility>

#include "checkpoint/safetensors.h"
#include "server/shard/pushes.h"

namespace muster::server {

/// A chunk or a table as it was at one moment, given out in parts while it goes on. Owned by one thread; its chunk or
/// table outlives it, and has one image at a time.
class Image {
 public:
  /// What there is besides tensors.
  struct Facts {
    Pushes::Record made;
    bool has_sums = false;  ///< of the last step
    // Of a table:
    uint64_t counted = 0;      ///< steps, by the optimizer
    uint64_t rows = 0;         ///< that are kept
    uint64_t summed_rows = 0;  ///< of the last step's sums

    template <class M, class W>
    static void visit(M& m, W& w) {
      Pushes::Record::visit(m.made, w);
      w.number(m.has_sums);
      w.number(m.counted);
      w.number(m.rows);
      w.number(m.summed_rows);
    }
  };

  explicit Image(Facts facts) : facts(std::move(facts)) {}
  virtual ~Image() = default;
  Image(const Image&) = delete;
  Image& operator=(const Image&) = delete;

  const Facts facts;

  /// The next tensors, some megabytes of a table, by names that no other chunk or table has; none after the last.
  virtual checkpoint::NamedTensors next() = 0;
};

}  // namespace muster::server
