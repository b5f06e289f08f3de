#include "strategy/step_writes.h"

#include <string>

#include "device/device.h"
#include "muster/error.h"

namespace muster {

StepWrites::StepWrites(const ParameterRegistry& registry, const std::vector<c10::Device>& devices)
    : registry_(registry) {
  if (!share_memory(devices)) return;
  for (const auto& parameter : registry.parameters().front()) {
    versions_.push_back(static_cast<uint32_t>(parameter._version()));
  }
}

void StepWrites::check() const {
  const size_t replicas = registry_.parameters().size();
  for (size_t p = 0; p < versions_.size(); ++p) {
    const auto version = static_cast<uint32_t>(registry_.parameter(0, p)._version());
    if (version == versions_[p] || registry_.expects_writes(p)) continue;
    throw InvalidArgument(
        "parameter '" + registry_.name(p) + "' was written in the step, which runs once for each of " +
        std::to_string(replicas) +
        " replicas that share its memory, so that it was written as often, and while others read it; "
        "write it between steps, or use MultiWorkerMirroredStrategy, with a process for each replica");
  }
}

}  // namespace muster
