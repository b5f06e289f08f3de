// CONTRACT. What a set's replicas add up in a window besides gradients, and what becomes of it at the window's end.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "muster/step.h"
#include "optimizer/flat_optimizer.h"
#include "window/agreement.h"
#include "window/loss_scale.h"
#include "window/outcome.h"
#include "window/tail.h"

namespace muster {

/// A replica's part of a micro-batch, after its forward pass.
struct ReplicaPart {
  int local_replica = 0;
  const Loss* loss = nullptr;  ///< null: the part is empty, or its step failed
  double rows = 0;             ///< the loss's weight, unless it brings one
  bool is_first = true;        ///< of the window's micro-batches
  /// Backward sends gradients to other replicas, as through reduce(): the seed is then multiplied by the part's weight.
  bool crosses = false;
};

/// What backward and the gradient engine do with the part; see GradientEngine::MicroBatch.
struct NotedPart {
  at::Tensor seed;           ///< 0-dim, of the loss's dtype; undefined without a loss
  bool contributes = false;  ///< false: the part weighs nothing, and no other's gradients come through it
  double factor = 1;
  const double* gate = nullptr;
};

/// What a replica tells at a window's end besides its numbers.
struct Closing {
  Failure failure;  ///< of this replica, in any micro-batch of the window
  bool stop_requested = false;
  bool has_hooks = false;
  const Agreement* agreement = nullptr;  ///< null: nothing is compared
};

struct ClosedWindow {
  Tail tail;                          ///< summed over replicas
  std::vector<std::string> failures;  ///< with tail[Tail::failures] > 0: by replica, "type\ntext" or empty
};

/// Calls `work(local_replica)` for every local replica, on its thread.
using OnReplicas = std::function<void(const std::function<void(int local_replica)>& work)>;

/// One window at a time: open, weigh, note for every micro-batch, close, finish; after a fused finish that was finite
/// leave_means at most once, then update for each optimizer. Functions of the stepping thread are called while no
/// replica thread is in the set. Where replicas work on streams everything is ordered by the calling thread's current
/// stream. What reaches other processes throws CommError and its kinds; the window cannot be taken up again then.
class Window {
 public:
  virtual ~Window() = default;

  /// Stepping thread, before the first micro-batch. Local. Throws InvalidArgument where parameters were changed past
  /// the servers that hold them, CommError where servers hold half of the window before.
  virtual void open() = 0;

  /// Replica thread, after open(). Collective over replicas until a window was finished: the weights' unit is then
  /// guessed from `rows`, samples of a usual part (not above 0: unknown).
  virtual void weigh(int local_replica, double rows) = 0;

  /// Replica thread, once a micro-batch. Local. Adds the loss and its metrics to the window. Throws InvalidArgument for
  /// a weight that is negative or not finite (as far as the host sees it), and a metric that is not one number.
  virtual NotedPart note(const ReplicaPart& part) = 0;

  /// Replica thread, after the last micro-batch's flush(). Collective over replicas; blocks, but for streams. Sums the
  /// tail, tells failures and metrics, waits for the engine's buckets, and reduces sparse rows and buffers.
  virtual ClosedWindow close(int local_replica, const Closing& closing) = 0;

  /// Stepping thread, after all local replicas closed; `tail` is replica 0's. Takes the norm, merges buffers, and fills
  /// the numbers of `sums`. Gradients are left as means, clipped, in `.grad` of replica 0's parameters; with `fused` as
  /// sums, for update(). Where sums.ends_unchanged() it only ends the window. Collective over workers where the norm
  /// overflowed, or servers have a part in it. Throws InvalidArgument for sparse gradients that servers cannot take.
  virtual void finish(const Tail& tail, bool fused, WindowSums& sums) = 0;

  /// Stepping thread. Leaves means in `.grad`, lets `edit` change them there, and takes the norm of what it left.
  /// Returns what the host steps by, to be made equal on all ranks where they have hooks; null where the device has it.
  /// Throws what `edit` throws, InvalidArgument if it put a gradient of another layout there.
  virtual kernels::StepScalars* leave_means(const Tail& tail, const std::function<void()>& edit) = 0;

  /// Stepping thread. Steps `optimizer`, whose parameter i has registry index `parameters[i]`. With keep_gradients,
  /// `.grad` is the mean afterwards. Collective where replicas divide the step, or servers make it.
  virtual void update(const Tail& tail, FlatOptimizer& optimizer, const std::vector<int>& parameters,
                      const FlatGroups& groups, const OnReplicas& on_replicas) = 0;

  /// Stepping thread. Local. Loss, metrics and weight of this worker's share of the open window.
  virtual WindowSums so_far() const = 0;

  /// Stepping thread, between windows.
  virtual WindowScale& loss_scale() = 0;
};

}  // namespace muster
