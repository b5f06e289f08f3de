// cuda_memory.h of a build without CUDA.
#include "device/cuda_memory.h"
#include "muster/error.h"

namespace muster {

namespace {

[[noreturn]] void throw_no_cuda() {
  throw NotBuilt("this build of muster has no CUDA; build it with -DMUSTER_CUDA=ON, or use CPU devices");
}

}  // namespace

bool enable_cuda_peer_access(const std::vector<c10::Device>&) { throw_no_cuda(); }

at::Tensor cuda_zeros_over(const std::vector<DevicePart>&, const std::vector<c10::Device>&) { throw_no_cuda(); }

}  // namespace muster
