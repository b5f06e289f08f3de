// Parameters that show the same memory, which a strategy could not keep so: those of workers live where other processes
// store into them, and replicas step elements at the same time.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace muster {

struct MemoryOwner {
  const char* kind;  // "parameter", "buffer"
  std::string name;
  at::Tensor tensor;
};

/// Throws InvalidArgument naming two tensors that share elements, of which one at least is a parameter. The same tensor
/// twice, and tensors with gaps, are left alone.
void check_share_no_memory(const std::vector<MemoryOwner>& owners);

}  // namespace muster
