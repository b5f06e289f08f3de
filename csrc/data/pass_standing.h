// Where passes over loaders stand, as the workers of a synchronous job tell one that joins: the same bytes whichever
// language a worker is written in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "server/protocol/protocol.h"

namespace muster::detail {

/// Positions [begin, end) of a pass's order, which `members` (ascending) divide; none before it is asked for. The order
/// of a pass is that of the samples of all its batches, one batch after the other. A value.
struct SharedPiece {
  int64_t begin = 0;
  int64_t end = 0;
  std::vector<uint32_t> members = {};

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.begin);
    w.number(m.end);
    w.numbers(m.members, server::kMaxWorkers);
  }
};

/// Where the last pass over a loader is, in the window that is open. A value.
struct PassStanding {
  uint32_t loader = 0;
  uint64_t epoch = 0;
  bool is_left = false;                 ///< the loop was left: nothing follows
  int64_t taken = 0;                    ///< batches of the order that were asked for
  std::vector<SharedPiece> again = {};  ///< left undone by dead workers, and not asked for again
  std::vector<SharedPiece> asked = {};  ///< asked for, and not in a step
  std::vector<SharedPiece> open = {};   ///< in a step of the open window

  template <class M, class W>
  static void visit(M& m, W& w) {
    const auto pieces = [&](auto& list) {
      w.list(list, kMaxPieces, [](W& wire, auto& piece) { SharedPiece::visit(piece, wire); });
    };
    w.number(m.loader);
    w.number(m.epoch);
    w.number(m.is_left);
    w.number(m.taken);
    pieces(m.again);
    pieces(m.asked);
    pieces(m.open);
  }
  static constexpr size_t kMaxPieces = size_t{1} << 16;
};

/// By loader. A value.
struct PassStandings {
  std::vector<PassStanding> passes;

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.list(m.passes, PassStanding::kMaxPieces, [](W& wire, auto& pass) { PassStanding::visit(pass, wire); });
  }
};

}  // namespace muster::detail
