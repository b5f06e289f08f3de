// Means over ranks that see one another's memory, of tensors that stay where they are.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "comm/communicator.h"

namespace muster {

/// Of one rank; externally synchronised with its communicator, which outlives this.
class PeerAverage {
 public:
  /// Of a group whose ranks see one another's memory, and are not too many; none else.
  static std::optional<PeerAverage> over(comm::Communicator& communicator);

  /// Which of `tensors` average() may be given: those that peers reach and that share memory with none of the others.
  /// Undefined ones are none of them.
  std::vector<bool> may_change(const std::vector<at::Tensor>& tensors) const;

  /// Collective, blocking: each of `tensors` becomes its mean over ranks. They are contiguous, fp32 or fp64, what
  /// may_change() says, and agree in number, numel and dtype on all ranks. Each rank sums its share of every tensor
  /// along the tree of Communicator, divides it, and stores it on all ranks. Throws what ended the group; what the
  /// tensors hold is not known then.
  void average(const std::vector<at::Tensor>& tensors);

 private:
  explicit PeerAverage(comm::Communicator& communicator) : communicator_(&communicator) {}

  std::optional<uint64_t> address_of(const at::Tensor& tensor) const noexcept;

  comm::Communicator* communicator_;  // has PeerMemory
  at::Tensor addresses_;              // of this rank's tensors, for peers
};

}  // namespace muster
