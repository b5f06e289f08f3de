// What one server owns: chunks of parameters with their optimizer state, and the pushes that wait to be applied.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "optimizer/flat_optimizer.h"
#include "server/plan.h"
#include "server/protocol.h"

namespace muster::server {

/// Thread-safe: one mutex a chunk. Chunks are named by their index in cut_chunks(plan); one that another server owns is
/// an InvalidArgument.
class Shard {
 public:
  /// Tells whether a rank that has not pushed a step still may; called with a chunk's mutex held.
  using MayPush = std::function<bool(uint32_t rank, uint64_t step)>;

  Shard(const Plan& plan, uint32_t server, MayPush may_push);
  ~Shard();

  const Plan& plan() const noexcept { return plan_; }
  const std::vector<uint32_t>& chunks() const noexcept { return own_; }  ///< ascending

  /// Replaces a part of a chunk; `payload` has exactly its bytes. Creates state that is not there yet.
  void write(uint32_t chunk, Part part, Bytes payload);

  /// Calls `consume` with the part's bytes (none where there is no such state) and the number of steps made, once that
  /// is `at_least`; nobody changes them meanwhile. Helps with a step that is being applied. Throws Timeout at the
  /// deadline.
  using Consume = std::function<void(Bytes values, uint64_t steps)>;
  void read(uint32_t chunk, Part part, uint64_t at_least, Deadline deadline, const Consume& consume);

  /// Pushes of one worker that a chunk holds at once, at most.
  static constexpr size_t kMaxHeld = 4;

  /// Keeps a push until it is applied; `owner` keeps its memory alive. False: it is held or applied already. Throws
  /// InvalidArgument above kMaxHeld.
  bool hold(uint32_t rank, uint64_t incarnation, const Push& push, Bytes payload, std::shared_ptr<const void> owner);

  /// Adds what `members` pushed of a chunk, ahead of the demand, if all of them did.
  void sum_early(uint32_t chunk, uint64_t step, const std::vector<uint32_t>& members);

  /// The statistics of the sums over `members` of every chunk. Waits for pushes that may still come.
  std::vector<double> sum(uint64_t step, const std::vector<uint32_t>& members, Deadline deadline);

  /// See Apply. Several threads may apply one step: they divide its chunks. Synchronous: returns once every chunk has
  /// made the step. Else steps from the pushes of `rank`, each once.
  void apply(uint32_t rank, uint64_t incarnation, const Apply& apply, Deadline deadline);

  /// By chunk, the last applied step: of the worker's incarnation, where steps are not made together.
  std::vector<uint64_t> steps(uint32_t rank, uint64_t incarnation) const;

  /// The least of them.
  uint64_t least_step(uint32_t rank, uint64_t incarnation) const;

  /// Drops what a worker pushed and nobody will apply: steps that are not made together.
  void drop_pushes(uint32_t rank);

  /// Makes who waits look again.
  void wake();
  /// Everybody who waits, and will, throws CommError.
  void stop();

  /// Bytes of pushes that are held.
  int64_t held_bytes() const noexcept { return held_bytes_; }

  /// A copy of a chunk: tensors by name, and what is applied.
  struct Image {
    std::map<std::string, at::Tensor> tensors;
    uint64_t steps = 0;
    std::vector<uint32_t> ranks;  ///< where steps are not made together: whose pushes are in it, up to which step
    std::vector<uint64_t> incarnations;
    std::vector<uint64_t> applied;

    template <class M, class W>
    static void visit(M& m, W& w) {
      w.number(m.steps);
      w.numbers(m.ranks, kMaxWorkers);
      w.numbers(m.incarnations, kMaxWorkers);
      w.numbers(m.applied, kMaxWorkers);
    }
  };
  Image image(uint32_t chunk);
  /// `image.tensors` may hold those of other chunks, too. Throws CheckpointError for what is missing or of another
  /// shape.
  void restore(uint32_t chunk, const Image& image);

 private:
  struct Contribution {
    uint64_t incarnation = 0;
    Bytes values;
    std::shared_ptr<const void> owner;
  };

  struct Mark {
    uint64_t incarnation = 0;
    uint64_t step = 0;
  };

  using Contributions = std::map<uint32_t, Contribution>;  // by rank

  struct State {
    Chunk chunk;
    std::mutex mutex;
    std::condition_variable changed;
    // Guarded by mutex:
    at::Tensor memory;               // the parameters, with the gaps of chunk
    std::vector<at::Tensor> pieces;  // views of it
    std::unique_ptr<FlatOptimizer> optimizer;
    uint64_t steps = 0;
    std::map<uint32_t, Mark> marks;
    std::map<uint64_t, Contributions> held;  // by step
    uint64_t summed_step = 0;
    std::vector<uint32_t> summed_members;
    at::Tensor sums;                 // the sum of several members
    const std::byte* sum = nullptr;  // where it is: in `sums`, or what the only member pushed
    std::vector<double> partials;
    std::vector<double> made_partials;  // of step `steps`: a slow member may still ask for them
  };

  using Lock = std::unique_lock<std::mutex>;

  State& state(uint32_t chunk) const;
  void make_optimizer(State& state, const FlatGroups& groups) const;
  at::Tensor part_of(const State& state, size_t piece, Part part) const;
  void wait(State& state, Lock& lock, Deadline deadline, const char* what, const std::function<bool()>& ready);
  std::vector<uint32_t> wait_for_pushes(State& state, Lock& lock, uint64_t step, const std::vector<uint32_t>& members,
                                        Deadline deadline);
  void add(State& state, uint64_t step, const std::vector<uint32_t>& members);
  std::shared_ptr<const Apply> command_of(uint64_t step) const;
  void apply_together(State& state, const Apply& apply, Deadline deadline);
  void apply_alone(State& state, uint32_t rank, uint64_t incarnation, const Apply& apply);
  void step(State& state, const Apply& apply, const std::byte* gradients) const;
  void forget(State& state, std::map<uint64_t, Contributions>::iterator first,
              std::map<uint64_t, Contributions>::iterator last);

  const Plan plan_;
  const MayPush may_push_;
  std::vector<uint32_t> own_;
  std::map<uint32_t, std::unique_ptr<State>> states_;  // by chunk
  mutable std::mutex command_mutex_;
  std::shared_ptr<const Apply> command_;  // the last one of a synchronous job; guarded by command_mutex_
  std::atomic<int64_t> held_bytes_{0};
  std::atomic<bool> stopped_{false};
};

}  // namespace muster::server
