// CUDA as the NCCL backend calls it. In builds with CUDA alone.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "comm/nccl/api.h"

namespace muster::comm::nccl {

DeviceApi cuda_device_api();

/// The devices, the current one for each without an index. Throws InvalidArgument where one is not CUDA's.
std::vector<c10::Device> cuda_devices(const std::vector<c10::Device>& devices);

}  // namespace muster::comm::nccl
