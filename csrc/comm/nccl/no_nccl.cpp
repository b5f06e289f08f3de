// nccl.h of a build without NCCL.
#include "comm/nccl/nccl.h"

namespace muster::comm {
namespace {

[[noreturn]] void not_built() {
  throw NotBuilt(
      "this build of muster has no NCCL: rebuild it with -DMUSTER_CUDA=ON, where nvcc, a CUDA build of torch and the "
      "nvidia-nccl package are installed, or use CPU devices");
}

}  // namespace

bool has_nccl() noexcept { return false; }

CommunicatorPtr make_nccl(c10d::Store&, int, int, c10::Device, const NcclOptions&) { not_built(); }

std::vector<CommunicatorPtr> make_nccl(c10d::Store&, int, int, const std::vector<c10::Device>&,
                                       const std::vector<NcclOptions>&) {
  not_built();
}

}  // namespace muster::comm
