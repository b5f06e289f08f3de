// NCCL's part, played within one process: for ranks that share a device, which NCCL refuses.
#pragma once

#include <c10/core/DeviceType.h>

#include <vector>

#include "comm/nccl/api.h"

namespace muster::comm::nccl {

/// A table for one group, all of whose ranks are in this process: rank r on device `ordinals[r]` of the type,
/// several perhaps on one.
/// - Operations are called within groups, each rank's on one stream of its device. A group runs when it ends, on the
///   stream of the first rank that takes part: after what the streams of all that take part held, before what they are
///   given next. Calls that do not fit together are an error of group_end, and nothing runs.
/// - Arithmetic is that of the Communicator contract, on that rank's device; what lies on another is copied there and
///   back. Sums of f32, f64 and bf16 over at most kernels::cuda::kMaxPeers ranks whose buffers lie on 16 bytes are
///   DeviceApi::tree_sum; all else is torch's operations.
/// - Nothing is in progress after its call, and no error comes later. There are no windows; memory is torch's.
/// One thread at a time, as Clique calls it; allocate and free are thread-safe.
NcclApi make_in_process_api(const DeviceApi& device, c10::DeviceType type, const std::vector<int>& ordinals);

}  // namespace muster::comm::nccl
