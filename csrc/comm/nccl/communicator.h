// The communicator that nccl.h promises, over any tables of functions.
#pragma once

#include <vector>

#include "comm/nccl/api.h"
#include "comm/nccl/nccl.h"

namespace muster::comm::nccl {

/// As make_nccl of several ranks. The tables are copied.
std::vector<CommunicatorPtr> make_communicators(const NcclApi& nccl, const DeviceApi& device, c10d::Store& store,
                                                int first_rank, int size, const std::vector<c10::Device>& devices,
                                                const std::vector<NcclOptions>& options);

}  // namespace muster::comm::nccl
