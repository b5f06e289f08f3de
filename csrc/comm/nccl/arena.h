// Memory that NCCL reduces fastest: allocated by it and registered with the group.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "comm/nccl/launcher.h"

namespace muster::comm::nccl {

/// One rank's memory, in pieces that are each registered as a window. The pieces of all ranks have equal sizes, and a
/// tensor lies at the same offset in each rank's piece. A piece lives as long as a tensor in it, which keeps the clique
/// alive too: tensors, deregister, destroy (with the last of all), free. Memory of tensors that ended is given back
/// with their piece, not handed out again: when a tensor ends may differ between ranks. Owned by its rank's thread.
class Arena {
 public:
  Arena(std::shared_ptr<Launcher> launcher, int local, c10::Device device, size_t piece_bytes)
      : launcher_(std::move(launcher)), local_(local), device_(device), piece_bytes_(piece_bytes) {}

  /// Collective where a piece has to be made: waits on the host for the peers then. Zeroed on the current stream.
  at::Tensor allocate(int64_t numel, at::ScalarType dtype, Milliseconds timeout);

 private:
  struct Piece;
  void make_piece(size_t bytes, Milliseconds timeout);

  const std::shared_ptr<Launcher> launcher_;
  const int local_;
  const c10::Device device_;
  const size_t piece_bytes_;
  std::shared_ptr<Piece> piece_;  // the one that tensors are taken from
  size_t used_ = 0;               // of it
};

}  // namespace muster::comm::nccl
