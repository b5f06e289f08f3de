// From summed gradients to what every step kernel reads: divisor, norm, clip factor, finite or not.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "comm/communicator.h"
#include "core/ownership.h"
#include "core/plain_memory.h"
#include "device/segments.h"
#include "kernels/kernels.h"
#include "kernels/norm_sum.h"

namespace muster {

/// The rows of a sparse gradient, or all of a dense one; of complex values their parts.
inline at::Tensor dense_values(const at::Tensor& gradient) {
  return as_real(gradient.is_sparse() ? gradient._values() : gradient);
}

/// `sums` are fp32 or fp64 tensors, or complex ones of these, in registration order: dense, or coalesced COO with one
/// sparse dimension, whose rows have tiles of their own, so that it does not matter who has which row; `tail` is the
/// window's, from kernels::kWeight on. Fills `scalars` by kernels::finish_window, whose `unit` is that of the window's
/// seeds and is kept. A norm that overflows though every value is finite counts as finite.
void take_norm(const std::vector<at::Tensor>& sums, const double* tail, const kernels::WindowOptions& options,
               kernels::StepScalars& scalars);

/// take_norm from the partials of the sums' tiles as one. What overflows is not finite.
void finish_norm(const kernels::NormSum& sum, const double* tail, const kernels::WindowOptions& options,
                 kernels::StepScalars& scalars);

/// Adds the partials of the tiles of `sums`.
void add_partials(const std::vector<at::Tensor>& sums, double norm_type, kernels::NormSum& sum);

/// take_norm and the rest of kernels::finish_window on a device. Owned by one thread; everything is ordered by its
/// current stream.
class DeviceNorm {
 public:
  /// What finish_window reads and writes, in the device's memory.
  struct Window {
    const double* tail;
    kernels::StepScalars* scalars;
    kernels::LossScaleState* scale;  ///< or null
    kernels::WindowReport* report;   ///< or null
    uint32_t num_slots;              ///< of the report
  };

  /// `gradients` dense, else as take_norm's, on `device`. Two launches, three for many tiles.
  void enqueue(const std::vector<at::Tensor>& gradients, c10::Device device, const kernels::WindowOptions& options,
               const Window& window);

  /// What counts of the gradients on one of several devices; each run begins at a multiple of kernels::kTile.
  struct Part {
    c10::Device device;
    std::vector<at::Tensor> gradients;
    std::vector<Run> runs;
  };

  /// The same of gradients that several devices with peer access have parts of, so that every element counts on one.
  /// `window` is in the memory of the first one, whose current stream is ordered behind the others'. A launch more for
  /// each of those.
  void enqueue(const std::vector<Part>& parts, const kernels::WindowOptions& options, const Window& window);

  /// The same of gradients that replicas of several processes have parts of, without peer access: parts[l] is what
  /// counts on the l-th of this process's `replicas`. Collective over all, whose first ones all get what they would
  /// from whole gradients. Two launches more for each.
  void enqueue(const std::vector<Part>& parts, const std::vector<comm::CommunicatorPtr>& replicas,
               const kernels::WindowOptions& options, const Window& window);

 private:
  using Segments = std::vector<kernels::StatsSegment>;

  size_t place(Segments& segments, GraphMemory& memory, c10::Device device);
  void launch_stats(DeviceSegments<kernels::StatsSegment>& table, const Segments& segments, double norm_type,
                    c10::Device device);
  void launch_end(size_t tiles, const kernels::WindowOptions& options, const Window& window, c10::Device device);

  std::vector<DeviceSegments<kernels::StatsSegment>> tables_;  // by device
  // Sums of partials, then these: on the device where the window ends, and of partials between processes on each.
  std::vector<GraphMemory> memories_ = std::vector<GraphMemory>(1);
};

}  // namespace muster
