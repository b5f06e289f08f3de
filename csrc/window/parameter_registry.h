// The registry of the prepared modules' parameters and buffers, by local replica.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "embedding/row_initialiser.h"
#include "gradient/gradient_engine.h"
#include "window/copy_check.h"

namespace muster {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// One module as each local replica holds it; element r belongs to local replica r. Shared parameters appear once.
struct ModuleTensors {
  std::vector<NamedTensors> parameters;
  std::vector<NamedTensors> buffers;
};

/// Owned by the thread that prepares and steps. Parameters are indexed job-wide in registration order; a parameter of
/// the second and later modules is called "<module number>.<name>".
class ParameterRegistry {
 public:
  /// `devices`: of the local replicas.
  explicit ParameterRegistry(std::vector<c10::Device> devices) : devices_(std::move(devices)) {}

  /// Collective over workers. Compares names, shapes and dtypes (LayoutMismatch names the first difference), gives
  /// every worker the chief's values, and makes the local replicas on replica 0's device share its parameter memory:
  /// each keeps its own leaf, with a common version counter; those on other devices get copies. Returns the module's
  /// number. Throws InvalidArgument for a tensor that is not on its replica's device, is sparse, or is not
  /// materialised.
  int add(ModuleTensors module, comm::Communicator& workers);

  size_t num_parameters() const noexcept { return names_.size(); }
  const std::string& name(size_t parameter) const noexcept { return names_[parameter]; }
  const at::Tensor& parameter(size_t local_replica, size_t parameter) const noexcept {
    return parameters_[local_replica][parameter];
  }

  /// All of them, by local replica.
  const std::vector<std::vector<at::Tensor>>& parameters() const noexcept { return parameters_; }

  /// Index of a parameter of local replica 0, or -1.
  int find(const at::Tensor& parameter) const noexcept;

  /// Records that the parameter is the weight of an embedding.
  void note_rows(size_t parameter, const EmbeddingRows& rows) { rows_[parameter] = rows; }
  /// What note_rows() recorded; null for a parameter that is no embedding's weight.
  const EmbeddingRows* rows_of(size_t parameter) const noexcept;
  /// Once servers have begun with them.
  void drop_table_contents() noexcept {
    for (auto& [parameter, rows] : rows_) rows.contents = nullptr;
  }

  /// Records that forward writes the parameter, with values that do not depend on how often (an embedding's max_norm).
  void expect_writes(size_t parameter) { written_in_forward_.insert(parameter); }
  bool expects_writes(size_t parameter) const noexcept { return written_in_forward_.contains(parameter); }

  /// Parameters of one module, ascending.
  std::vector<int> parameters_of(int module) const;

  /// Buffers of all modules, by local replica, in registration order.
  const std::vector<at::Tensor>& buffers(size_t local_replica) const noexcept { return buffers_[local_replica]; }
  /// Replaces a local replica's buffers of one module, which became other tensors (`.to()`, assignment in forward).
  /// Called by the replica's thread in a step, else by the stepping thread. Throws InvalidArgument if their number
  /// changed.
  void set_buffers(int module, size_t local_replica, const std::vector<at::Tensor>& buffers);
  const std::vector<std::string>& buffer_names() const noexcept { return buffer_names_; }
  /// A buffer's sizes when it was added.
  const std::vector<int64_t>& prepared_sizes(size_t buffer) const noexcept { return prepared_sizes_[buffer]; }

  /// Records that a parameter has the values of the other workers, as after prepare() and steps.
  void note_agreed(size_t parameter);
  /// Whether the parameter was written or replaced since note_agreed(), in ways that torch counts: writes through
  /// `.data` leave no trace.
  bool was_written(size_t parameter) const noexcept;
  /// Lets the parameter count as written until note_agreed().
  void doubt(size_t parameter) noexcept { agreed_[parameter] = {nullptr, ~uint32_t{0}, agreed_[parameter].times}; }
  /// How often it was noted that it has the others' values.
  uint64_t times_agreed(size_t parameter) const noexcept { return agreed_[parameter].times; }

  /// Lets the other local replicas' leaves follow parameters of replica 0 that were moved or replaced (`.to()`,
  /// `load_state_dict(assign=True)`), in memory and in requires_grad, and hooks of C++ that were registered on them.
  /// Replicas on other devices get copies of parameters that were written since the last copy; of all parameters with
  /// `copies_all`, since writes to `.data` leave no trace: by `between`, the handles of a group of the local replicas
  /// alone, each of which has a device of its own; where that is empty, by copies. Those that note_copied() is true of
  /// are compared, and copied where they differ.
  void follow_moves(bool copies_all, const std::vector<comm::CommunicatorPtr>& between = {});
  /// These parameters of replica 0 were stored to all replicas' devices, which have peer access.
  void note_copied(const std::vector<int>& parameters);
  /// Whether all local replicas have the parameter with the same sizes, strides and dtype, each on its device and
  /// without gaps in memory.
  bool are_alike(size_t parameter) const;

 private:
  void share_with_replicas(size_t parameter);
  void follow_hooks(size_t parameter);
  void copy_to_replica(size_t local_replica, const std::vector<size_t>& parameters);
  void broadcast(const std::vector<size_t>& parameters, const std::vector<comm::CommunicatorPtr>& between);
  bool is_alike(size_t local_replica, size_t parameter) const;
  bool follows(size_t local_replica, size_t parameter) const;
  bool are_copied(size_t parameter) const;
  void check_local(const ModuleTensors& module) const;

  std::vector<c10::Device> devices_;
  std::vector<std::string> names_;
  std::vector<int> modules_;                         // parameter -> module
  std::vector<std::vector<at::Tensor>> parameters_;  // [local replica][parameter]
  std::vector<std::vector<at::Tensor>> buffers_;     // [local replica][buffer]
  std::vector<std::string> buffer_names_;
  std::vector<std::vector<int64_t>> prepared_sizes_;  // by buffer
  std::vector<size_t> first_buffer_;                  // by module, and the end
  std::unordered_map<const c10::TensorImpl*, int> index_;
  std::unordered_map<size_t, EmbeddingRows> rows_;
  std::unordered_set<size_t> written_in_forward_;
  struct Agreed {
    const void* data = nullptr;
    uint32_t version = 0;
    uint64_t times = 0;
  };
  std::vector<Agreed> agreed_;  // by parameter: replica 0's at note_agreed()
  // [local replica][parameter]: replica 0's when it was copied
  std::vector<std::vector<std::optional<uint32_t>>> copied_versions_;
  std::optional<CopyCheck> copy_check_;      // once copies were noted
  std::vector<const void*> followed_hooks_;  // by parameter: of replica 0, those that the others call
  int num_modules_ = 0;
};

}  // namespace muster
