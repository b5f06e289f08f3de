// make_device_local of a build without CUDA.
#include "comm/nccl/nccl.h"

namespace muster::comm {

std::vector<CommunicatorPtr> make_device_local(const std::vector<c10::Device>&, const std::vector<NcclOptions>&) {
  throw NotBuilt(
      "this build of muster has no CUDA: rebuild it with -DMUSTER_CUDA=ON (AUTO where there is no NCCL), where nvcc "
      "and "
      "a CUDA build of torch are installed, or use CPU devices");
}

}  // namespace muster::comm
