#include "strategy/step_writes.h"

#include <string>

#include "device/device.h"
#include "muster/error.h"

namespace muster {

namespace {

// Of thousands of parameters in every step: what writes to one as a whole changes both of its ends.
WriteTrace trace_of(const at::Tensor& parameter) { return WriteTrace::of(parameter, /*samples=*/2); }

}  // namespace

StepWrites::StepWrites(const ParameterRegistry& registry, const std::vector<c10::Device>& devices, bool are_compared)
    : registry_(registry), is_shared_(share_memory(devices)), are_compared_(are_compared) {
  const auto& parameters = registry.parameters();  // none of any replica where no module is prepared
  if (parameters.empty() || (!is_shared_ && !are_compared_)) return;
  for (const auto& parameter : parameters.front()) before_.push_back(trace_of(parameter));
}

void StepWrites::check(const std::string& call, bool may_stay) const {
  if (!is_shared_) return;
  const size_t replicas = registry_.parameters().size();
  for (size_t p = 0; p < before_.size(); ++p) {
    if (!was_written(p, /*in_place=*/true)) continue;
    if (may_stay && trace_of(registry_.parameter(0, p)).sample == before_[p].sample) continue;
    throw InvalidArgument(
        "parameter '" + registry_.name(p) + "' was written in " + call + ", which calls its function for each of " +
        std::to_string(replicas) +
        " replicas that share its memory, so that it was written as often, and while others read it; "
        "write it between such calls, or use MultiWorkerMirroredStrategy, with a process for each replica");
  }
}

std::vector<size_t> StepWrites::written() const {
  std::vector<size_t> written;
  if (!are_compared_) return written;
  for (size_t p = 0; p < before_.size(); ++p) {
    if (was_written(p, /*in_place=*/false)) written.push_back(p);
  }
  return written;
}

// Memory that a program has replaced is its replica's own; on a device torch replaces that of recurrent modules.
bool StepWrites::was_written(size_t p, bool in_place) const {
  const auto& parameter = registry_.parameter(0, p);
  const auto now = trace_of(parameter);
  const auto& before = before_[p];
  if (now == before || registry_.expects_writes(p)) return false;
  if (now.version != before.version || now.memory == before.memory) return true;
  return !in_place && parameter.is_cpu();
}

}  // namespace muster
