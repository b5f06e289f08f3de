// CUDA as the NCCL backend calls it. In builds with CUDA alone.
#pragma once

#include <c10/core/Device.h>

#include "comm/nccl/api.h"

namespace muster::comm::nccl {

DeviceApi cuda_device_api();

/// The device, the current one where it has no index. Throws InvalidArgument of one that is not CUDA's.
c10::Device cuda_device(c10::Device device);

}  // namespace muster::comm::nccl
