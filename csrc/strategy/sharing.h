// Batches that the workers which are live divide among themselves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "data/loader_pass.h"
#include "muster/loader.h"
#include "server/protocol/protocol.h"
#include "strategy/strategy_core.h"

namespace muster::detail {

/// Positions [begin, end) of a pass's order, which `members` (ascending) divide; none before it is asked for. A value.
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

/// Where the last pass over a loader is, in the window that is open: for a worker that joins. A value.
struct PassStanding {
  uint32_t loader = 0;
  uint64_t epoch = 0;
  bool is_left = false;  ///< the loop was left: nothing follows
  int64_t taken = 0;
  std::vector<SharedPiece> again = {};
  std::vector<SharedPiece> asked = {};
  std::vector<SharedPiece> open = {};

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

/// Of all loaders.
struct PassStandings {
  std::vector<PassStanding> passes;

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.list(m.passes, PassStanding::kMaxPieces, [](W& wire, auto& pass) { PassStanding::visit(pass, wire); });
  }
};

/// A pass over batches that are divided over the workers which are expected in the next step when a batch is asked for.
/// What a worker had of a batch when it died is divided again, as a batch of its own, over the others: equal on all of
/// them, since they ask for as many batches between any two steps.
class Sharing final : public LoaderPass {
 public:
  /// A pass over the `loader`-th of the strategy in `order`, cut into `batches` of `batch_size`, of which the last may
  /// be shorter.
  Sharing(std::shared_ptr<StrategyCore> core, int loader, int64_t epoch, std::vector<size_t> order, int64_t batch_size,
          int64_t batches);

  /// Goes on where another worker's pass was in a window that was closed since, of the parts of `members`. Throws
  /// InvalidArgument for a pass over other data.
  void go_on(const PassStanding& others, const std::vector<uint32_t>& members);
  PassStanding standing() const;

  /// Nothing more comes of the pass.
  void end() { ended_ = true; }

  /// Those of dead workers first.
  std::optional<int64_t> next() override;
  /// This worker's part of a batch, perhaps empty. Thread-safe.
  ReadTask task_of(int64_t number) const;
  void yielded(int64_t number) override;
  void lost(int64_t number) override;
  void done() override { current_.reset(); }
  /// Whether dead workers left something. Does not wait.
  bool wait_for_more() override { return !again_.empty(); }

  /// The batch that the loop got goes into a step.
  void stepped();
  /// The window of those steps was made of the parts of these ranks, ascending.
  void settle(const std::vector<uint32_t>& members);
  /// It was dropped, everywhere.
  void forget() { open_.clear(); }

 private:
  std::vector<uint32_t> expected() const;
  /// Without members.
  static SharedPiece part_of(const SharedPiece& shared, uint32_t rank);

  const std::shared_ptr<StrategyCore> core_;
  const uint32_t loader_;
  const uint64_t epoch_;
  const std::vector<size_t> order_;
  const int64_t batch_size_;
  const int64_t batches_;
  int64_t taken_ = 0;  // of them
  std::deque<SharedPiece> again_;
  std::deque<SharedPiece> promised_;      // asked for by others before this worker joined them, and not by this one
  int64_t last_ = -1;                     // number that was given
  mutable std::mutex mutex_;              // of asked_, from which readers take their tasks
  std::map<int64_t, SharedPiece> asked_;  // and not yielded, by number
  std::optional<SharedPiece> current_;
  std::vector<SharedPiece> open_;  // in the open window
  bool ended_ = false;
};

}  // namespace muster::detail
