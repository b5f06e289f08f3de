// The check that no two parameters share memory. A strategy cannot keep such sharing: workers' parameters move to
// memory that other processes store into, and replicas step elements at the same time.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace muster {

/// A tensor of a module, as an error names it.
struct MemoryOwner {
  const char* kind;  // "parameter", "buffer"
  std::string name;
  at::Tensor tensor;
};

/// Throws InvalidArgument naming two tensors that share elements, of which one at least is a parameter. The same tensor
/// twice, and tensors with gaps, are left alone.
void check_share_no_memory(const std::vector<MemoryOwner>& owners);

}  // namespace muster
