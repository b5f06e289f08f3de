// Buffers of one replica (batch norm's running statistics, say), merged over replicas where nothing may wait for the
// device.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "comm/communicator.h"
#include "muster/options.h"

namespace muster {

/// Called by the replica's thread in a step, else by the stepping thread; ordered by the current stream.
class DeviceBuffers {
 public:
  using Tensors = std::vector<at::Tensor>;

  /// Takes the values that the next merge compares with.
  void note(const Tensors& buffers);

  /// Collective. `weight`: of this replica's losses, 0-dim on the device.
  void reduce(comm::Communicator& replicas, const Tensors& buffers, const at::Tensor& weight, Buffers policy);

  /// After reduce, once its result is on the current stream: every element that a replica wrote since note() becomes
  /// the mean over replicas, integers the maximum (Buffers::chief: replica 0's). Nothing changes where `total_weight`
  /// (0-dim) is not above 0.
  void merge(const Tensors& buffers, const at::Tensor& total_weight, Buffers policy);

  /// Makes the current stream wait for reduce.
  void wait();

 private:
  at::Tensor noted_;     // floating ones, end to end, fp64
  at::Tensor sums_;      // of values times weight, then of written flags
  at::Tensor integers_;  // int64
  std::vector<comm::Work> works_;
};

}  // namespace muster
