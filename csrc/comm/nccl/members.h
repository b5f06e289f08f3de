// What the ranks of a group are checked for before NCCL starts it.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "comm/nccl/api.h"
#include "comm/nccl/nccl.h"

namespace muster::comm::nccl {

/// Local. Throws InvalidArgument for ranks, options or control groups of this process that no group can be made of.
void check_arguments(int first_rank, int size, const std::vector<c10::Device>& devices,
                     const std::vector<NcclOptions>& options);

/// Local. Throws InvalidArgument where `control` is no handle of this rank on the host.
void check_control(const Communicator& control, int rank, int size);

/// Collective over the control groups, where there are any. Throws InvalidArgument on every rank where two have the
/// same GPU, with the remedy: what NCCL says of it has none, and comes late.
void check_devices_differ(const DeviceApi& device, int first_rank, const std::vector<int>& devices,
                          const std::vector<NcclOptions>& options);

}  // namespace muster::comm::nccl
