#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "device/device.h"
#include "job/make_groups.h"
#include "job/nccl_groups.h"

namespace muster {

Groups groups_in_process(const std::vector<c10::Device>& devices, comm::Milliseconds timeout) {
  const int replicas = static_cast<int>(devices.size());
  const auto device = devices.front();
  Groups groups;
  groups.workers = comm::make_single();
  if (!is_streamed(device)) {
    groups.gradients = comm::make_local(replicas, timeout);
    groups.step = comm::make_local(replicas, timeout);
    groups.backend = "the memory of this process";
    return groups;
  }
  groups.workers = comm::make_staged(groups.workers, device);
  groups.control = comm::make_local(replicas, timeout);
  const bool shares_device = share_memory(devices);  // which NCCL refuses
  const bool is_alone = replicas == 1 && (device.is_cpu() || !uses_nccl_alone());
  const auto make = [&](const std::string& name, int max_ctas) -> std::vector<comm::CommunicatorPtr> {
    if (is_alone) return {comm::make_single(device)};
    if (device.is_cpu() && !played_group()) return comm::make_local(replicas, timeout);
    const auto options = with_control(comm::make_local(replicas, timeout), timeout, max_ctas);
    if (device.is_cpu()) return played_group()(options);
    if (shares_device) return comm::make_device_local(devices, options);
    c10d::PrefixStore prefixed(name, c10::make_intrusive<c10d::HashStore>());
    return comm::make_nccl(prefixed, 0, replicas, devices, options);
  };
  groups.gradients = make("gradients", 0);
  groups.step = make("step", kStepCtas);
  groups.backend = is_alone        ? "nothing: there is one replica"
                   : shares_device ? "the memory of this process's devices"
                                   : "NCCL";
  return groups;
}

}  // namespace muster
