#include <muster/version.h>
#include <torch/headeronly/version.h>

namespace muster {

const char* version() noexcept { return MUSTER_VERSION; }

const char* built_with_torch() noexcept { return TORCH_VERSION; }

}  // namespace muster
