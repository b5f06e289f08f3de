// The state of a flat optimizer: by parameter, each tensor in storage of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "comm/communicator.h"
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

/// A parameter with its state, as a step reads and writes them. A value that shares the tensors' memory.
struct StateEntry {
  static constexpr size_t kStates = 3;
  static constexpr size_t kMaster = kStates;  ///< the number of the master copy beside states

  FlatParameter parameter;
  at::ScalarType dtype{};        ///< of the parameter when its state was made
  std::vector<int64_t> sizes;    ///< likewise
  std::vector<int64_t> strides;  ///< likewise
  Run run;                       ///< elements that this shard owns, in memory order
  bool is_dense = true;          ///< its memory has neither gaps nor overlaps
  at::Tensor states[kStates];
  at::Tensor master;      ///< fp32, of a low-precision parameter
  at::Tensor step;        ///< steps taken: 0-dim fp32, on the parameters' device
  size_t num_states = 0;  ///< equal on all ranks, also where this one owns nothing of them
  /// Where all processes or devices see states[s], and the master copy at kMaster; null where they do not. See
  /// is_common.
  const void* common[kStates + 1] = {};
  bool started = false;    ///< took a step, or was given state
  bool was_given = false;  ///< state, or its end, since workers last agreed on it

  at::Tensor& tensor(size_t which) { return which == kMaster ? master : states[which]; }
  const at::Tensor& tensor(size_t which) const { return which == kMaster ? master : states[which]; }
  /// The step count where it is on the host. Without the check of the dtype that data_ptr<float>() makes: a step reads
  /// one for every parameter.
  float& count() const { return *static_cast<float*>(step.mutable_data_ptr()); }
  /// Whether all processes see the tensor `which`.
  bool is_common(size_t which) const {
    return common[which] != nullptr && common[which] == tensor(which).const_data_ptr();
  }
  /// Whether the parameter has another shape than when its state was made.
  bool is_resized() const { return parameter.tensor.sizes() != at::IntArrayRef(sizes); }
  /// tensor(which) as the next step begins with it, to be kept elsewhere; see current_master.
  at::Tensor current(size_t which) const;
};

/// So many bytes of memory that all processes or devices see, of which one share of a step owns the most.
struct CommonPart {
  size_t share;
  int64_t bytes;
};

/// Whether a parameter of this dtype is of low precision (bf16, fp16), and so has a master copy.
bool has_master(at::ScalarType dtype);

/// The fp32 `master` of a low-precision `parameter` of its sizes, as a step begins with it: elements that do not round
/// to the parameter's are older than it, and are its own there. Whatever wrote the parameter, its version counter does
/// not matter: a write through `.data` leaves that alone, and one of the values that are there takes no bits away.
/// `master` itself where it is all current, or of another shape; of a parameter that is of low precision no more, that
/// one's values.
at::Tensor current_master(const at::Tensor& master, const at::Tensor& parameter);

/// State is kept in the accumulation dtype (fp32 but for fp64 parameters) and in the parameter's memory order; bf16 and
/// fp16 parameters have an fp32 master copy. With a Shard of several ranks this rank keeps the state of its share of
/// tiles. State may lie in memory that several processes see (common memory), each element stepped by its owner.
///
/// `which` is the number of a state tensor, or StateEntry::kMaster. Owned by the thread that steps.
class OptimizerState {
 public:
  /// As FlatOptimizer's.
  OptimizerState(std::vector<FlatParameter> parameters, const FlatGroups& groups, const Shard& shard);

  size_t num_parameters() const noexcept { return entries_.size(); }
  c10::Device device() const noexcept { return device_; }
  const Shard& shard() const noexcept { return shard_; }
  /// On a streamed device the step counts of all parameters, each entry's `step` being one of them; else undefined.
  const at::Tensor& counts() const noexcept { return counts_; }
  StateEntry& entry(size_t parameter) { return entries_.at(parameter); }
  const StateEntry& entry(size_t parameter) const { return entries_.at(parameter); }

  /// Names of the state tensors, torch.optim's: exp_avg, exp_avg_sq, max_exp_avg_sq; momentum_buffer; sum.
  const std::vector<const char*>& names() const noexcept;

  /// A tensor of a parameter's state, of its sizes and strides; a 1-dim run of it where another rank has the rest;
  /// undefined where there is none (no such option, or nothing of it in this shard).
  const at::Tensor& tensor(size_t parameter, size_t which) const { return entry(parameter).tensor(which); }
  /// Of every parameter the steps taken, on the host: waits for the device.
  std::vector<float> step_counts() const;
  /// What processes that divide a step must have alike of a parameter.
  struct Standing {
    float steps = 0;  ///< relevant ones that it took; 0 on a device, which is not waited for, and of SGD's shards
    bool has_own_state = false;  ///< state that was loaded and no other process sees
    bool started = false;        ///< as StateEntry's
  };
  Standing standing(size_t parameter) const;
  /// A count of steps as far as a step depends on it: SGD knows its first one alone, and torch's state of it has no
  /// count.
  float relevant_steps(float count) const noexcept;

  /// Replaces state tensor `which` by one of the values of `whole` (the parameter's sizes, or tensor()'s; of a row-wise
  /// parameter's sizes each row's mean is taken). Who has the one before keeps its values; so for the two below. Throws
  /// InvalidArgument where the algorithm has no such state.
  void set(size_t parameter, size_t which, const at::Tensor& whole);
  void set_step_count(size_t parameter, double count);
  /// Undefined: the parameter's values.
  void set_master(size_t parameter, const at::Tensor& whole);

  /// Drops a parameter's state, so that its next step is a first one.
  void reset(size_t parameter);

  /// Collective. A tensor of a parameter's state on every rank, put together from all shards; a copy. Undefined where
  /// no rank has one.
  at::Tensor whole(size_t parameter, size_t which, comm::Communicator& ranks) const;

  /// Elements of every parameter that each part owns, where rank r has a shard which it divides into parts_of_rank[r]
  /// parts; [part][parameter], rank 0's parts first.
  std::vector<std::vector<Run>> runs_for(const std::vector<int>& parts_of_rank) const;

  /// Parameters that took their first step, or got more state, since the last call.
  std::vector<size_t> take_started();

  /// Lets state follow a parameter that was moved, converted or reordered since the last step, or given another shape
  /// where it has no state, or state of that shape alone. Throws InvalidArgument where it cannot (row-wise and sharded
  /// state, and state of another shape), and where user code changed the step count's dtype in place.
  void follow(size_t parameter);
  /// Counts a step of a parameter that has `num_states` tensors from here on; after follow. On a streamed device the
  /// step itself counts.
  void begin_step(size_t parameter, size_t num_states);
  /// Undoes begin_step: nothing was stepped.
  void take_back_step(size_t parameter);

  /// The memory that all processes or devices see which `parameters`, having `num_states` tensors each, need for the
  /// state that is not there yet: part after part, with whose it is by `runs[share][parameter]`, which cover what this
  /// shard owns of every parameter once. Row-wise state and that of parameters without elements here stays where it is.
  std::vector<CommonPart> common_parts(const std::vector<size_t>& parameters, const std::vector<size_t>& num_states,
                                       const std::vector<std::vector<Run>>& runs) const;
  /// Moves that state to `memory`, zeros of as many bytes: of `runs[share][parameter]` the values, elsewhere other
  /// processes' come. Returns the tensors that lie there from here on.
  std::vector<at::Tensor> move_to_common(const std::vector<size_t>& parameters, const std::vector<size_t>& num_states,
                                         const at::Tensor& memory, const std::vector<std::vector<Run>>& runs);
  /// Before a step of this process alone: a parameter's state is in memory of its own.
  void leave_common(size_t parameter);

  /// Uninitialised memory, shaped as a parameter's state.
  at::Tensor empty_state(size_t parameter) const { return empty_state(entry(parameter)); }

 private:
  friend class FlatOptimizer;
  friend class StepPlan;

  struct Move {
    size_t parameter;
    size_t which;
    int64_t offset;  // in bytes
  };

  void check_row_wise(const FlatParameter& parameter, const FlatGroups& groups) const;
  void check_sizes(const StateEntry& entry, const at::Tensor& whole, at::IntArrayRef sizes) const;
  bool follow(StateEntry& entry);  // whether it has other tensors now
  void follow_sizes();
  void follow_before_set(StateEntry& entry);
  void take_shape(StateEntry& entry) const;
  void check_shard_sizes() const;
  void check_tensors(size_t parameter) const;  // where a step touches them in any case
  void check_tensor(const StateEntry& entry, size_t which) const;
  bool fits(const StateEntry& entry, const at::Tensor& tensor) const;
  [[noreturn]] void refuse(const StateEntry& entry, size_t which) const;
  [[noreturn]] void refuse(const StateEntry& entry, const char* name, const at::Tensor& held,
                           const std::string& expected) const;
  void allocate(StateEntry& entry, size_t num_states);
  void note_new_state(StateEntry& entry, size_t which);
  void note_started(size_t parameter);
  at::TensorOptions device_options(at::ScalarType dtype) const;
  at::Tensor empty_state(const StateEntry& entry) const;
  at::Tensor zero_state(const StateEntry& entry) const;
  at::Tensor new_master(const StateEntry& entry) const;  // undefined where there is to be none
  at::Tensor own_part(const StateEntry& entry, const at::Tensor& whole) const;
  std::vector<Move> moves_to_common(const std::vector<size_t>& parameters, const std::vector<size_t>& num_states,
                                    int64_t& bytes) const;

  std::vector<StateEntry> entries_;
  size_t algorithm_;  // index of FlatGroups
  Shard shard_;
  std::vector<size_t> started_;
  c10::Device device_;
  at::Tensor counts_;
};

}  // namespace muster
