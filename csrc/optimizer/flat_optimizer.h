// Flat optimizers: one pass over gradient, state and parameter that divides, clips, decays and steps.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "device/segments.h"
#include "device/table.h"
#include "kernels/kernels.h"
#include "optimizer/flat_groups.h"
#include "optimizer/shards.h"

namespace muster {

/// One parameter of a flat optimizer: a leaf, and the group whose hyperparameters it follows.
struct FlatParameter {
  std::string name;  ///< for messages
  at::Tensor tensor;
  uint32_t group = 0;
  bool is_row_wise = false;  ///< Adagrad with one accumulator a row (the first dimension); see rowwise_adagrad_step
};

/// The gradient of one parameter in a step: a dense sum, rows of one, or neither, which leaves the parameter untouched.
struct FlatGradient {
  at::Tensor dense;   ///< accumulation dtype; the parameter's sizes and memory order
  at::Tensor sparse;  ///< coalesced COO with one sparse dimension; values in the accumulation dtype
};

/// What one of a process's replicas does of a step that it divides with others.
struct StepShare {
  std::vector<FlatGradient> gradients;  ///< by parameter; all shares have gradients of the same parameters
  std::vector<Run> runs;                ///< by parameter; the runs of all processes' shares cover it once
};

/// A step that the replicas of one or several processes divide.
struct DividedStep {
  std::vector<StepShare> shares;  ///< by local replica
  /// From this process's parameters, in bytes, to where other processes have theirs; these see every write.
  std::vector<ptrdiff_t> displacements;
  /// As comm::PeerMemory::allocate_common, where there are several processes; else null.
  std::function<at::Tensor(int64_t bytes)> allocate_common;
  /// With it: is given each state tensor that lies there from here on. Moved elsewhere, as by give_own_memory, it is
  /// this process's alone again.
  std::function<void(const at::Tensor& state)> note_common;
  /// Calls `work(share)` for every share, all at once where threads are at hand. Null: one after the other.
  std::function<void(const std::function<void(size_t share)>& work)> for_each;
};

/// State is kept by parameter, each tensor in storage of its own, in the accumulation dtype (fp32 but for fp64
/// parameters) and in the parameter's memory order. bf16 and fp16 parameters have an fp32 master copy, which is what
/// steps; a low-precision parameter that user code wrote since the last step is taken over into it.
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

  size_t num_parameters() const noexcept { return entries_.size(); }
  /// Whose hyperparameters a parameter follows.
  uint32_t group(size_t parameter) const noexcept { return entries_[parameter].parameter.group; }
  const Shard& shard() const noexcept { return shard_; }
  bool is_streamed() const noexcept { return steps_.defined(); }

  /// Steps every parameter that has a gradient, by `scalars` in the memory of the parameters' device; see kernels.h.
  /// `gradients` has one element a parameter.
  /// With `keep` the dense sums and sparse values that are read become means (not those of other shards, nor rows that
  /// are made dense). Bumps the version counters of what it writes. Local.
  /// Throws InvalidArgument if `groups` has another alternative or fewer groups than the parameters name, and for a
  /// dense gradient of a row-wise parameter.
  void step(std::vector<FlatGradient> gradients, const FlatGroups& groups, const kernels::StepScalars* scalars,
            bool keep);

  /// As step, of which this process does its shares. The parameters are dense. Where there are several processes every
  /// one makes the same call; state then lies in memory that all of them see, so that it is whole on each though each
  /// element is stepped, and its parameter stored everywhere, by its owner alone; rows of a row-wise parameter are
  /// stepped by every process. Parameters and state are equal everywhere once all have returned. Throws InvalidArgument
  /// in a shard.
  void step_divided(const DividedStep& divided, const FlatGroups& groups, const kernels::StepScalars* scalars,
                    bool keep);

  /// As step, from `.grad` of every parameter: mean gradients of any dtype and memory order, left as they are. Throws
  /// InvalidArgument in a shard, whose ranks must step together.
  void step_from_grad(const FlatGroups& groups);

  /// Collective over the shard's ranks, after step on all: every rank gets the parameters that others stepped.
  void gather_parameters(comm::Communicator& ranks);

  /// Names of the state tensors, torch.optim's: exp_avg, exp_avg_sq, max_exp_avg_sq; momentum_buffer; sum.
  const std::vector<const char*>& state_names() const noexcept;

  /// State tensor `which` of a parameter, of its sizes and strides; a 1-dim run of it where another rank has the rest;
  /// undefined where there is none (no such option, or nothing of it in this shard).
  at::Tensor state(size_t parameter, size_t which) const;
  /// Number of steps the parameter took: 0-dim fp32, on the parameters' device.
  const at::Tensor& step_count(size_t parameter) const;
  /// All of them, on the host: waits for the device.
  std::vector<float> step_counts() const;
  /// What processes that divide a step must have alike of a parameter.
  struct Standing {
    float steps = 0;             ///< that it took; 0 on a device, which is not waited for
    bool has_own_state = false;  ///< state that was loaded and no other process sees
  };
  Standing standing(size_t parameter) const;
  /// The fp32 master copy of a low-precision parameter, else undefined; a 1-dim run in a shard.
  const at::Tensor& master(size_t parameter) const;

  /// Whether a parameter has taken a step, or was given state.
  bool has_started(size_t parameter) const noexcept { return entries_[parameter].started; }

  /// How many state tensors a parameter has, on other ranks of its shards alone too.
  size_t num_states(size_t parameter) const noexcept { return entries_[parameter].num_states; }

  /// Replaces state tensor `which` by one of the values of `whole` (the parameter's sizes, or state()'s; of a row-wise
  /// parameter's sizes each row's mean is taken). Who has the one before keeps its values; so for the two below.
  void set_state(size_t parameter, size_t which, const at::Tensor& whole);
  void set_step_count(size_t parameter, double count);
  /// Undefined: the parameter's values.
  void set_master(size_t parameter, const at::Tensor& whole);

  /// Drops a parameter's state, so that its next step is a first one.
  void reset(size_t parameter);

  /// Collective. State `which` (kMaster: the master copy) of a parameter on every rank, put together from all shards; a
  /// copy. Undefined where no rank has one.
  at::Tensor whole_state(size_t parameter, size_t which, comm::Communicator& ranks) const;
  static constexpr size_t kMaster = 3;

  /// Parameters that took their first step, or got more state, since the last call.
  std::vector<size_t> take_started();

 private:
  static constexpr size_t kStates = 3;

  struct Entry {
    FlatParameter parameter;
    at::ScalarType dtype{};        // of the parameter when its state was made
    std::vector<int64_t> strides;  // likewise
    Run run;                       // elements that this shard owns, in memory order
    bool is_dense = true;          // its memory has neither gaps nor overlaps
    at::Tensor states[kStates];
    at::Tensor master;
    at::Tensor step;
    int64_t master_version = -1;  // of the parameter when the master copy was last equal to it
    size_t num_states = 0;        // equal on all ranks, also where this one owns nothing of them
    // Where all processes see states[s], and the master copy at kMaster; null where they do not. See is_common.
    const void* common[kStates + 1] = {};
    bool started = false;
  };

  struct Segments;

  void follow(Entry& entry);
  void allocate(Entry& entry, size_t num_states);
  at::Tensor& tensor_of(Entry& entry, size_t which) const;
  const at::Tensor& tensor_of(const Entry& entry, size_t which) const;
  bool is_common(const Entry& entry, size_t which) const;
  void move_to_common(const DividedStep& divided);
  void take_back_step(size_t parameter);
  void leave_common(size_t parameter);
  void note_started(size_t parameter);
  void refresh_master(const Entry& entry, const Run& run) const;
  at::TensorOptions device_options(at::ScalarType dtype) const;
  at::Tensor empty_state(const Entry& entry) const;
  at::Tensor own_part(const Entry& entry, const at::Tensor& whole) const;
  at::Tensor dense_of(const Entry& entry, const at::Tensor& sparse) const;
  void check_row_wise(const FlatParameter& parameter, const FlatGroups& groups) const;
  void check_sizes(const Entry& entry, const at::Tensor& whole, at::IntArrayRef sizes) const;
  std::vector<std::vector<Run>> runs_of_ranks() const;
  void begin_step(size_t parameter, const FlatGroups& groups, bool is_common);
  void add_gradient(const Entry& entry, const Run& run, void* parameter, const FlatGradient& gradient,
                    const FlatGroups& groups, Segments& segments) const;
  void add_run(const Entry& entry, const Run& run, void* parameter, void* gradient, Segments& segments) const;
  void add_dense(const Entry& entry, const Run& run, void* parameter, const at::Tensor& gradient,
                 Segments& segments) const;
  template <class F>
  static void for_each_row(const at::Tensor& gradient, Segments& segments, const F& function);
  void add_sparse(const Entry& entry, const Run& run, void* parameter, const at::Tensor& gradient,
                  Segments& segments) const;
  void add_whole_rows(const Entry& entry, const FlatGradient& gradient, const FlatGroups& groups,
                      Segments& segments) const;
  void run(const Segments& segments, const FlatGroups& groups, const kernels::StepScalars& scalars, bool keep,
           const kernels::StepCopies& copies) const;
  void enqueue(const Segments& segments, const FlatGroups& groups, const kernels::StepScalars* scalars, bool keep);

  std::vector<Entry> entries_;
  size_t algorithm_;  // index of FlatGroups
  Shard shard_;
  std::vector<size_t> started_;
  c10::Device device_;
  // Where the device is streamed:
  at::Tensor steps_;          // of all parameters; each entry's step is one of them
  std::vector<double> used_;  // 1 for each parameter that takes part in the step
  DeviceTable<double> used_table_;
  DeviceGroups device_groups_;
  DeviceTable<kernels::StepScalars> scalars_table_;  // of step_from_grad
  DeviceSegments<kernels::StepSegment> singles_;     // by accumulation dtype
  DeviceSegments<kernels::StepSegment> doubles_;
};

}  // namespace muster
