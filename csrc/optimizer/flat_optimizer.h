// Flat optimizers: one pass over gradient, state and parameter that divides, clips, decays and steps.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "device/peer_access.h"
#include "device/table.h"
#include "kernels/kernels.h"
#include "optimizer/flat_groups.h"
#include "optimizer/optimizer_state.h"
#include "optimizer/shards.h"
#include "optimizer/step_segments.h"

namespace muster {

/// The part of a step that one of a process's replicas makes, where several divide it.
struct StepShare {
  std::vector<FlatGradient> gradients;  ///< by parameter; all shares have gradients of the same parameters
  /// By parameter; the runs of all processes' shares cover it once. None: what the optimizer's shard owns.
  std::vector<Run> runs = {};
  /// Where devices with peer access divide the step: the parameters as this share's device has them, and what it steps
  /// by there. Else the optimizer's own.
  std::vector<at::Tensor> parameters = {};
  const kernels::StepScalars* scalars = nullptr;
};

/// A step that the replicas of one or several processes divide.
struct DividedStep {
  std::vector<StepShare> shares;  ///< by local replica
  /// Whether all shares' devices get what one steps; else the caller brings it there.
  bool stores_to_all = true;
  /// From this process's parameters, in bytes, to where other processes have theirs; these see every write.
  std::vector<ptrdiff_t> displacements = {};
};

class FlatOptimizer;

/// A step that FlatOptimizer::begin prepared: its shares run, then it finishes. Lives shorter than the optimizer, and
/// than what begin was given by reference. Where no share ran, its end takes back the counts of steps: nothing was
/// stepped. Owned by the thread that steps, but for run.
class StepPlan {
 public:
  StepPlan(const StepPlan&) = delete;
  StepPlan& operator=(const StepPlan&) = delete;

  size_t num_shares() const noexcept { return segments_.size(); }
  /// Steps one share. Shares may run at once, each on a thread; on CUDA it is enqueued on the calling thread's current
  /// stream of the share's device, behind what begin enqueued on that of the optimizer's.
  void run(size_t share);
  /// After all shares have run: bumps the version counters of what was written.
  void finish();

 private:
  friend class FlatOptimizer;
  StepPlan(FlatOptimizer& optimizer, const DividedStep& divided, const FlatGroups& groups,
           const kernels::StepScalars* scalars, bool keep);

  /// Parameters whose step was counted; takes the counts back where it ends before a share began.
  struct Counted {
    Counted(OptimizerState& of, bool begun) : state(of), has_begun(begun) {}
    ~Counted();
    Counted(const Counted&) = delete;
    Counted& operator=(const Counted&) = delete;

    OptimizerState& state;
    std::vector<size_t> parameters;
    std::atomic<bool> has_begun;
  };

  void add_segments(size_t parameter);

  FlatOptimizer& optimizer_;
  const DividedStep& divided_;
  const FlatGroups& groups_;
  const kernels::StepScalars* scalars_;
  const bool keep_;
  Counted counted_;
  std::vector<StepSegments> segments_;                 // by share
  std::vector<std::pair<size_t, at::Tensor>> packed_;  // parameters with gaps in their memory, and their values
};

/// Steps parameters by their gradients' sums; see OptimizerState for what it keeps of them. What steps of a
/// low-precision parameter is its fp32 master copy, as current_master.
///
/// Sparse rows: each touched row is stepped like a parameter of its own with the parameter's step count; untouched rows
/// keep parameter and state (Adam: as torch.optim.SparseAdam). With momentum or, but for Adam, weight decay, a step
/// moves every row, so the gradient is made dense. A row-wise parameter's rows are the only ones that ever move; its
/// state `sum` has the sizes [rows, 1].
///
/// With a Shard of several ranks, this rank keeps the state of its share of tiles and steps that; gather_parameters()
/// then brings the others'.
///
/// All parameters are on one device, and so is their state. On CUDA (device/device.h's is_streamed) everything is
/// enqueued on the calling thread's current stream and nothing waits for it, but for sparse gradients, whose rows the
/// host reads.
///
/// Owned by the thread that steps.
class FlatOptimizer {
 public:
  /// Throws InvalidArgument for a parameter that is neither on the CPU nor on CUDA, not on the device of the first one,
  /// or not of dtype fp32, fp64, bf16 or fp16; for a row-wise one that is not a contiguous fp32 matrix on the CPU, in a
  /// shard, or of another optimizer than Adagrad without weight decay.
  FlatOptimizer(std::vector<FlatParameter> parameters, const FlatGroups& groups, const Shard& shard = {});

  size_t num_parameters() const noexcept { return state_.num_parameters(); }
  /// The group whose hyperparameters a parameter follows.
  uint32_t group(size_t parameter) const { return state_.entry(parameter).parameter.group; }
  const Shard& shard() const noexcept { return state_.shard(); }
  bool is_streamed() const noexcept { return state_.counts().defined(); }
  OptimizerState& state() noexcept { return state_; }
  const OptimizerState& state() const noexcept { return state_; }

  /// Before a step, and before entries' runs are read: they are of the shapes that parameters have. Throws
  /// InvalidArgument where one that requires a gradient has another shape than its state, or, in a shard, than when the
  /// state was divided.
  void follow_shapes();

  /// Steps every parameter that has a gradient, by `scalars` in the memory of the parameters' device; see kernels.h.
  /// `gradients` has one element a parameter.
  /// With `keep` the dense sums and sparse values that are read become means (not those of other shards, nor rows that
  /// are made dense). Bumps the version counters of what it writes. Local.
  /// Throws InvalidArgument if `groups` has another alternative or fewer groups than the parameters name, for a dense
  /// gradient of a row-wise parameter or one of another shape than its parameter, and where user code changed the shape
  /// or dtype of state in place.
  void step(std::vector<FlatGradient> gradients, const FlatGroups& groups, const kernels::StepScalars* scalars,
            bool keep);

  /// Begins the same as shares, which the caller runs. The parameters are dense. Where processes or devices divide the
  /// step every process begins it, after share_state, so that state is whole on each though each element is stepped,
  /// and its parameter stored everywhere, by its owner alone; rows of a row-wise parameter are stepped by every
  /// process. Parameters and state are equal everywhere once all have run their shares. `divided`, `groups` and what
  /// `scalars` point to outlive the plan.
  StepPlan begin(const DividedStep& divided, const FlatGroups& groups, const kernels::StepScalars* scalars, bool keep);

  /// Before a begin by which several processes or devices divide a step: bytes of memory that all of them see (common
  /// memory) which the state of the parameters that have a gradient needs; equal on all, 0 where it lies there already.
  /// Throws InvalidArgument in a shard, and as step does for `groups`.
  int64_t common_bytes(const DividedStep& divided, const FlatGroups& groups);
  /// Likewise of devices alone, also in a shard, one part after the other: share r's on `devices[r]`.
  std::vector<DevicePart> common_parts(const DividedStep& divided, const FlatGroups& groups,
                                       const std::vector<c10::Device>& devices);
  /// After common_bytes, moves that state to `memory`, zeros of as many bytes, each element's value from its owner.
  /// Returns the tensors that lie there from here on; moved elsewhere, as by give_own_memory, one is this process's
  /// alone again.
  std::vector<at::Tensor> share_state(const DividedStep& divided, const FlatGroups& groups, const at::Tensor& memory);

  /// As step, from `.grad` of every parameter: mean gradients of any dtype and memory order, left as they are. Throws
  /// InvalidArgument in a shard, whose ranks must step together.
  void step_from_grad(const FlatGroups& groups);

  /// Collective over the shard's ranks, after step on all: every rank gets the parameters that others stepped.
  void gather_parameters(comm::Communicator& ranks);
  /// The same over replicas whose operations are enqueued on devices: the host does not wait. `replicas` are this
  /// process's, of which copies[l] are the parameters of the l-th, dense; runs[replica][parameter] is what was stepped
  /// there.
  void broadcast_parameters(const std::vector<std::vector<at::Tensor>>& copies,
                            const std::vector<std::vector<Run>>& runs,
                            const std::vector<comm::CommunicatorPtr>& replicas);

 private:
  friend class StepPlan;

  void check_kind(const FlatGroups& groups) const;
  size_t num_states_for(size_t parameter, const FlatGroups& groups);
  std::vector<size_t> started_of(at::ScalarType dtype) const;
  std::vector<size_t> num_states_of(const std::vector<size_t>& parameters, const FlatGroups& groups);

  OptimizerState state_;
  size_t algorithm_;  // index of FlatGroups
  // Where the device is streamed:
  std::vector<StepQueue> queues_;                    // by share
  DeviceTable<double> used_;                         // 1 for each parameter that takes part in a step
  DeviceTable<kernels::StepScalars> scalars_table_;  // of step_from_grad
};

}  // namespace muster
