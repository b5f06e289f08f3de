// CUDA's part of peer_access.h; a build without CUDA has no_cuda_memory.cpp, and no check_cuda.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "device/peer_access.h"

namespace muster {

/// Throws CommError where a call of CUDA's runtime failed, with this cudaError_t. Takes the runtime's last error with
/// it: torch's next check need not find it.
void check_cuda(int error, const char* what);

/// See enable_peer_access and zeros_over. Throw NotBuilt in a build without CUDA.
bool enable_cuda_peer_access(const std::vector<c10::Device>& devices);
at::Tensor cuda_zeros_over(const std::vector<DevicePart>& parts, const std::vector<c10::Device>& devices);

}  // namespace muster
