// The merge over replicas of one replica's buffers (batch norm's running statistics, say) where nothing may wait for
// the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "comm/communicator.h"
#include "muster/options.h"

namespace muster {

/// Merges floating and complex buffers, and buffers of integers and bools that a replica wrote. Called by the replica's
/// thread in a step, else by the stepping thread; ordered by the current stream.
class DeviceBuffers {
 public:
  using Tensors = std::vector<at::Tensor>;

  /// Remembers the buffers as the window begins with them, for add_written() and reduce() to compare with.
  void note(const Tensors& buffers);

  /// Adds 1 to written[b] for each buffer of integers or bools that this replica wrote or replaced since note().
  /// Whether floating ones were written is found on the device, element by element: batch norm leaves no trace.
  void add_written(const Tensors& buffers, double* written) const;

  /// Collective over replicas; enqueues. `weight`: the sum of this replica's losses' weights, 0-dim on the device;
  /// `written`: add_written()'s counts, summed over replicas.
  void reduce(comm::Communicator& replicas, const Tensors& buffers, const double* written, const at::Tensor& weight,
              Buffers policy);

  /// Makes the current stream wait for reduce().
  void wait();

  /// Writes the result, after wait(): floating elements that a replica wrote since note() become the mean over replicas
  /// by weight, integers the maximum (Buffers::chief: replica 0's values). Nothing changes where `total_weight` (0-dim,
  /// on the device) is not above 0.
  void merge(const Tensors& buffers, const at::Tensor& total_weight, Buffers policy);

 private:
  struct Noted {
    at::Tensor buffer;
    int64_t version;
  };

  at::Tensor noted_;                 // floating and complex buffers, end to end by dtype, fp64: when the window began
  at::Tensor values_;                // and at its end, until merge()
  std::vector<Noted> noted_others_;  // by buffer
  Tensors written_;                  // buffers of integers and bools that a replica wrote
  at::Tensor sums_;                  // over replicas: values times weight, then counts of writers by element
  at::Tensor integers_;              // the values of written_, end to end, int64
  std::vector<comm::Work> works_;
};

}  // namespace muster
