#include <torch/csrc/distributed/c10d/HashStore.hpp>

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
  if (is_alone) {
    groups.gradients = {comm::make_single(device)};
    groups.step = {comm::make_single(device)};
  } else if (device.is_cpu() && !played_group()) {
    groups.gradients = comm::make_local(replicas, timeout);
    groups.step = comm::make_local(replicas, timeout);
  } else {
    const auto options = with_control(comm::make_local(replicas, timeout), timeout);
    c10d::HashStore store;
    groups.gradients = device.is_cpu() ? played_group()(options)
                       : shares_device ? comm::make_device_local(devices, options)
                                       : comm::make_nccl(store, 0, replicas, devices, options);
    share_order(groups, comm::make_local(replicas, timeout));
  }
  groups.backend = is_alone        ? "nothing: there is one replica"
                   : shares_device ? "the memory of this process's devices"
                                   : "NCCL";
  return groups;
}

}  // namespace muster
