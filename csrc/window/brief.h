// What a worker of a synchronous job tells one that has joined.
#pragma once

#include <cstdint>
#include <string>

#include "server/protocol/protocol.h"

namespace muster {

/// A value: as things were before the window whose record carries it, but for `passes`, which know its batches.
struct Brief {
  uint64_t since = 0;  ///< the step after which the worker that tells came in
  double unit = 1;     ///< of weights
  double loss_scale = 1;
  uint32_t growth_tracker = 0;  ///< of the loss scale
  uint64_t steps = 0;           ///< windows closed
  uint64_t calls = 0;           ///< t of the random streams, in the window's last call
  std::string passes;           ///< over loaders, in the words of the language layer

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.since);
    w.number(m.unit);
    w.number(m.loss_scale);
    w.number(m.growth_tracker);
    w.number(m.steps);
    w.number(m.calls);
    w.text(m.passes, server::kMaxRecord);
  }
};

}  // namespace muster
