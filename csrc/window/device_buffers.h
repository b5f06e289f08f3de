// Buffers of one replica (batch norm's running statistics, say), merged over replicas where nothing may wait for the
// device.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "comm/communicator.h"
#include "muster/options.h"

namespace muster {

/// Floating buffers take part, and those of integers and bools that a replica wrote; complex ones stay each replica's
/// own. Called by the replica's thread in a step, else by the stepping thread; ordered by the current
/// stream.
class DeviceBuffers {
 public:
  using Tensors = std::vector<at::Tensor>;

  /// Takes what the next window compares with.
  void note(const Tensors& buffers);

  /// Adds 1 to written[b] for each buffer of integers or bools that this replica wrote or replaced since note().
  /// Whether floating ones were written is found on the device, element by element: batch norm leaves no trace.
  void add_written(const Tensors& buffers, double* written) const;

  /// Collective. `weight`: of this replica's losses, 0-dim on the device; `written`: sums over replicas.
  void reduce(comm::Communicator& replicas, const Tensors& buffers, const double* written, const at::Tensor& weight,
              Buffers policy);

  /// Makes the current stream wait for reduce.
  void wait();

  /// After wait. Every floating element that a replica wrote since note() becomes the mean over replicas, integers the
  /// maximum (Buffers::chief: replica 0's). Nothing changes where `total_weight` (0-dim) is not above 0.
  void merge(const Tensors& buffers, const at::Tensor& total_weight, Buffers policy);

 private:
  struct Noted {
    at::Tensor buffer;
    int64_t version;
  };

  at::Tensor noted_;                 // floating ones, end to end, fp64
  std::vector<Noted> noted_others_;  // by buffer
  Tensors written_;                  // of integers and bools, by a replica
  at::Tensor sums_;                  // of values times weight, then of written flags
  at::Tensor integers_;              // those of written_, int64
  std::vector<comm::Work> works_;
};

}  // namespace muster
