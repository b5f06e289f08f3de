// The dense parameters of a set as parameter servers hold them: giving, reading and fetching their values.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "core/write_trace.h"
#include "embedding/row_initialiser.h"
#include "optimizer/flat_optimizer.h"
#include "server/worker/client.h"

namespace muster {

/// The parameters of a window, this process's, dense or not, and what is known of the optimizer that steps them.
struct ServerParameters {
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
  const FlatOptimizer* optimizer = nullptr;  ///< whose state servers take over
  std::vector<size_t> position;              ///< in the optimizer, by parameter
  std::vector<uint32_t> group_of;            ///< by parameter
  std::vector<const EmbeddingRows*> rows;    ///< by parameter; not null: the weight of an embedding
  FlatGroups groups;
};

/// A part of a parameter that an optimizer steps; undefined where there is none.
at::Tensor part_of(const at::Tensor& parameter, const FlatOptimizer& optimizer, size_t position, server::Part part);

template <class T>
std::span<T> span_of(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr<T>(), static_cast<size_t>(tensor.numel())};
}

/// Parameters are numbered as in the servers' plan. Owned by the thread that steps; what reaches a server throws as
/// ServerClient. The client outlives this.
class ServerValues {
 public:
  explicit ServerValues(server::ServerClient& client) : client_(client) {}

  /// Adds the plan's next parameter, which has `position` in the optimizer; all of them before land().
  void add(const at::Tensor& parameter, size_t position);
  size_t size() const noexcept { return parameters_.size(); }
  /// Makes room for values that are read.
  void land();

  /// Writes a part of every chunk, where the optimizer has it.
  void give(const FlatOptimizer& optimizer, server::Part part);

  /// By chunk, where servers are to write the parameters; adopt() then brings them into the parameters.
  const std::vector<std::byte*>& landing() const noexcept { return landing_; }
  void read(uint64_t at_least);
  void adopt();

  /// Whether a parameter was written or got other memory since adopt(). Of what is written past the version counter,
  /// through `.data`, a sample tells.
  bool was_written(size_t parameter) const;
  /// Whether a parameter that was has other values than adopt() gave it. One that has not, since it was moved to memory
  /// that processes share, say, then counts as not written.
  bool has_other_values(size_t parameter);
  /// Whether all parameters have the values that adopt() gave them, whatever wrote there since.
  bool hold_what_landed();
  /// Before values are read anew: notes a parameter that has other values than adopt() gave it, which the next adopt()
  /// overwrites.
  void note_overwritten();
  /// The first one that was noted, once.
  std::optional<size_t> take_overwritten() noexcept { return std::exchange(overwritten_, std::nullopt); }

  /// A part of parameters, of their sizes (Part::steps: 0-dim fp32); undefined where there is none.
  /// `wanted`: false by parameter that stays undefined; empty: all are wanted.
  std::vector<at::Tensor> fetch(server::Part part, uint64_t at_least, const std::vector<bool>& wanted = {});

  /// Whether servers have the elements of a parameter in row-major order.
  bool is_row_major(size_t parameter) const;

 private:
  struct Parameter {
    at::Tensor tensor;
    std::vector<int64_t> strides;  // of its slot
    size_t position;               // in the optimizer
    WriteTrace trace;              // after the last adopt()
  };

  bool has_landed_values(size_t parameter) const;
  static at::Tensor in_slot_order(const Parameter& parameter, const at::Tensor& values);

  server::ServerClient& client_;
  std::vector<Parameter> parameters_;
  std::vector<std::byte*> landing_;  // what adopt() took, until values are read anew
  std::optional<size_t> overwritten_;
};

}  // namespace muster
