// The pieces of memory that a step of a flat optimizer reads and writes, and the kernels' run over them.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "device/segments.h"
#include "device/table.h"
#include "kernels/kernels.h"
#include "optimizer/flat_groups.h"
#include "optimizer/optimizer_state.h"

namespace muster {

/// The gradient of one parameter in a step: a dense sum, rows of one, or neither, which leaves the parameter untouched.
struct FlatGradient {
  at::Tensor dense;   ///< accumulation dtype; the parameter's sizes and memory order
  at::Tensor sparse;  ///< coalesced COO with one sparse dimension; values in the accumulation dtype

  bool defined() const noexcept { return dense.defined() || sparse.defined(); }
};

/// What one share of a step reads and writes, in three kinds: segments of fp32, of fp64, and rows of row-wise Adagrad.
/// They point into tensors that outlive it. Built by one thread; run and the kinds may be read by another.
class StepSegments {
 public:
  /// Adds `run`, of which this shard owns all, of a parameter whose elements lie in memory order at `parameter`. Sparse
  /// rows are segments of their own, unless the step moves every row: the gradient is made dense then. `copies`: where
  /// the parameter's elements lie on other devices, which get what is stepped; as many for all parameters.
  void add(const StateEntry& entry, const Run& run, void* parameter, const FlatGradient& gradient,
           const FlatGroups& groups, const std::vector<void*>& copies = {});
  /// Adds the rows of a row-wise parameter's gradient, with one element of state each; they are not cut into runs.
  /// Throws InvalidArgument for a dense gradient.
  void add_rows(const StateEntry& entry, const FlatGradient& gradient, const FlatGroups& groups);

  /// Steps all on the CPU, by torch's intra-op threads, and stores the parameters in the memory of `copies`, too.
  void run(const FlatGroups& groups, const kernels::StepScalars& scalars, bool keep,
           const kernels::StepCopies& copies) const;

  /// Segments of one accumulation dtype.
  struct Kind {
    std::vector<kernels::StepSegment> segments;
    std::vector<void*> copies;  ///< of each segment, as many for all
  };
  const Kind& singles() const noexcept { return singles_; }
  const Kind& doubles() const noexcept { return doubles_; }

 private:
  /// Where a parameter's elements lie.
  struct Place {
    void* own;
    const std::vector<void*>& copies;
  };

  void add_run(const StateEntry& entry, const Run& run, const Place& parameter, void* gradient);
  void add_dense(const StateEntry& entry, const Run& run, const Place& parameter, const at::Tensor& gradient);
  void add_sparse(const StateEntry& entry, const Run& run, const Place& parameter, const at::Tensor& gradient);
  template <class F>
  void for_each_row(const at::Tensor& gradient, const F& function);

  Kind singles_;
  Kind doubles_;
  std::vector<kernels::StepSegment> rows_;  // their groups are numbers in row_groups_
  std::vector<kernels::RowwiseAdagradGroup> row_groups_;
  std::vector<at::Tensor> kept_;  // tensors that segments point into and nobody else holds
};

/// Enqueues steps on a device, whose memory keeps the tables of segments from step to step. Owned by the thread that
/// steps.
class StepQueue {
 public:
  /// Enqueues a step on the current stream of `device`; `scalars` are in the device's memory.
  void enqueue(const StepSegments& segments, const FlatGroups& groups, const kernels::StepScalars* scalars, bool keep,
               c10::Device device);

 private:
  struct Tables {
    DeviceSegments<kernels::StepSegment> segments;
    DeviceTable<void*> copies;
  };

  void launch(kernels::DType dtype, const StepSegments::Kind& host, Tables& tables, const kernels::StepScalars* scalars,
              bool keep, c10::Device device);

  DeviceGroups groups_;
  Tables singles_;
  Tables doubles_;
};

}  // namespace muster
