// Batches that the workers which are live divide among themselves.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "data/members.h"
#include "data/pass.h"
#include "data/pass_standing.h"

namespace muster::detail {

/// A pass over batches that are divided over the replicas of the workers which are expected in the next step when a
/// batch is asked for. What a worker had of a batch when it died is divided again, as a batch of its own, over the
/// others: equal on all of them, since they ask for as many batches between any two steps.
class SharedPass final : public LoaderPass {
 public:
  /// The number of samples of the batch that follows in the pass's order; empty at its end. Called by next() and
  /// go_on().
  using NextBatch = std::function<std::optional<int64_t>()>;

  /// This worker's part of a batch, as positions of the pass's order.
  struct Part {
    int64_t batch = 0;  ///< the first position of what is divided
    int64_t begin = 0;
    int64_t end = 0;             ///< `begin` where the part is empty
    std::vector<int64_t> sizes;  ///< of what each local replica gets of it, in order
  };

  /// `replicas_of_worker`: by rank; empty: each has one.
  SharedPass(std::shared_ptr<Members> members, uint32_t rank, server::PassId pass, NextBatch next_batch,
             std::vector<int> replicas_of_worker = {});

  /// Begins behind so many batches of the order, where no more of it was asked for.
  void skip(int64_t batches);
  /// Batches of the order, from its beginning on, of which every sample went into a step of a worker that lives: what a
  /// job that is started again is to skip(). Where dead workers left some undone, a warning says how many samples
  /// behind those batches were trained on, and would come once more.
  int64_t num_trained() const;

  /// Goes on where another worker's pass was in a window that was closed since, of the parts of `members`. Throws
  /// InvalidArgument for a pass over other data.
  void go_on(const PassStanding& others, const std::vector<uint32_t>& members);
  /// Where it is, in the window that is open, for a worker that joins.
  PassStanding standing() const;

  /// Nothing more comes of the pass, and its loop was not left.
  void end() { ended_ = true; }

  /// Those of dead workers first.
  std::optional<int64_t> next() override;
  /// Thread-safe.
  Part part_of(int64_t number) const;
  /// No piece that is still to be read, or may be divided again, begins before this position.
  int64_t oldest_position() const;
  void yielded(int64_t number) override;
  void lost(int64_t number) override;
  void done() override { current_.reset(); }
  /// Whether dead workers left something. Does not wait.
  bool wait_for_more() override { return !again_.empty(); }
  std::optional<server::BatchId> begin_step() override;
  void end_step(WindowEnd window, const std::vector<uint32_t>& members) override;

 private:
  int replicas_of(uint32_t rank) const;
  /// Of a rank that is no member: empty.
  Part part_of_rank(const SharedPiece& shared, uint32_t rank) const;
  std::optional<SharedPiece> take_batch();
  /// What went into no step of what was taken, but for what was lost.
  std::vector<SharedPiece> left() const;
  /// Of the open window.
  void return_parts_of_lost(const std::vector<uint32_t>& members);

  const std::shared_ptr<Members> members_;
  const uint32_t rank_;
  const std::vector<int> replicas_of_worker_;
  const server::PassId pass_;
  const NextBatch next_batch_;
  int64_t taken_ = 0;     // batches
  int64_t position_ = 0;  // behind them
  std::deque<int64_t>
      begins_;  // positions of the last batches that were taken, from one before the oldest that is left
  std::deque<SharedPiece> again_;
  std::deque<SharedPiece> promised_;      // asked for by others before this worker joined them, and not by this one
  int64_t last_ = -1;                     // number that was given
  mutable std::mutex mutex_;              // of asked_, from which readers take their parts
  std::map<int64_t, SharedPiece> asked_;  // and not yielded, by number
  std::optional<SharedPiece> current_;
  std::vector<SharedPiece> open_;  // in the open window
  bool ended_ = false;
  bool was_left_by_others_ = false;
};

}  // namespace muster::detail
