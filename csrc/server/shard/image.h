// What a chunk or a stripe of a table held at one moment.
#pragma once

#include <cstdint>
#include <utility>

#include "checkpoint/safetensors.h"
#include "kernels/norm_sum.h"
#include "server/protocol/protocol.h"
#include "server/shard/pushes.h"

namespace muster::server {

/// A chunk or a stripe as it was at one moment, given out in parts while it goes on. Owned by one thread; its chunk or
/// stripe outlives it, and has one image at a time.
class Image {
 public:
  /// What there is besides tensors.
  struct Facts {
    Pushes::Record made;
    bool has_norm = false;
    kernels::NormSum norm = {};  ///< of the last step's sums
    // Of a table:
    uint64_t counted = 0;  ///< steps, by the optimizer
    uint64_t rows = 0;     ///< that are kept

    template <class M, class W>
    static void visit(M& m, W& w) {
      Pushes::Record::visit(m.made, w);
      w.number(m.has_norm);
      visit_value(m.norm, w);
      w.number(m.counted);
      w.number(m.rows);
    }
  };

  explicit Image(Facts facts) : facts(std::move(facts)) {}
  virtual ~Image() = default;
  Image(const Image&) = delete;
  Image& operator=(const Image&) = delete;

  const Facts facts;

  /// Of a table: those that come block by block.
  virtual uint64_t row_bytes() const { return 0; }

  /// The next tensors, some megabytes of a table, by names that no other chunk or stripe has; none after the last.
  virtual checkpoint::NamedTensors next() = 0;
};

}  // namespace muster::server
