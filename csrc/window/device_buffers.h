// The merge over replicas of one replica's buffers (batch norm's running statistics, say) where nothing may wait for
// the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "comm/communicator.h"
#include "device/segments.h"
#include "device/table.h"
#include "kernels/cuda/cuda_kernels.h"
#include "muster/options.h"

namespace muster {

/// Merges floating and complex buffers, and buffers of integers and bools that a replica wrote: what gather() leaves is
/// summed over replicas, then merge() writes the result. Two launches, however many buffers there are, and copies of
/// those whose elements do not lie one after another, or have a dtype that no kernel serves. Called by the replica's
/// thread in a step, else by the stepping thread; ordered by the current stream.
class DeviceBuffers {
 public:
  using Tensors = std::vector<at::Tensor>;

  /// Notes what floating buffers have before the first window, and where there are more or fewer than in the last one.
  void open(const Tensors& buffers);

  /// Adds 1 to written[b] for each buffer of integers or bools that this replica wrote or replaced since merge().
  /// Whether floating ones were written is found on the device, element by element: batch norm leaves no trace.
  void add_written(const Tensors& buffers, double* written) const;

  /// Begins a merge over so many replicas; `written`: add_written()'s counts, summed over them. Returns how many
  /// numbers replicas sum.
  int64_t begin(const Tensors& buffers, const double* written, int replicas);

  /// Enqueues what this replica adds to `sums`: so many numbers, fp64, on the device. `weight`: the sum of its losses'
  /// weights, there too. Collective over replicas: enqueues the reduction of integers where there are many.
  void gather(comm::Communicator& replicas, const at::Tensor& sums, const double* weight, Buffers policy);

  /// Makes the current stream wait for gather().
  void wait();

  /// Writes the result, after wait(), from the summed `sums`: floating elements that a replica wrote since open() or
  /// the last merge() become the mean over replicas by weight, integers the maximum (Buffers::chief: replica 0's
  /// values). Nothing changes where *total_weight (on the device) is not above 0.
  void merge(const Tensors& buffers, const at::Tensor& sums, const double* total_weight, Buffers policy);

 private:
  /// A buffer that is merged.
  struct Part {
    at::Tensor buffer;
    at::Tensor copy;  ///< what kernels work on; undefined: the buffer itself
  };
  struct Noted {
    at::Tensor buffer;
    int64_t version;
  };

  at::Tensor copy_of(size_t index, const at::Tensor& buffer);
  void reserve_noted(c10::Device device);
  kernels::cuda::BufferPlan plan_on(c10::Device device);
  kernels::cuda::BufferSums arrays_of(const at::Tensor& sums) const;

  std::vector<Part> parts_;
  std::vector<kernels::cuda::BufferSegment> segments_;
  uint64_t num_averaged_ = 0;  // elements
  uint64_t num_integers_ = 0;
  int replicas_ = 0;
  DeviceSegments<kernels::cuda::BufferSegment> on_device_;
  GraphMemory noted_;            // averaged elements, fp64: as merge() left them
  uint64_t num_noted_ = 0;       // NaN, where neither open() nor merge() saw them
  at::Tensor integers_;          // their values, int64, where they do not travel in sums
  Tensors copies_;               // by buffer, kept from window to window
  std::vector<Noted> versions_;  // by buffer, as merge() left them
  comm::Work work_;              // on integers_
};

}  // namespace muster
