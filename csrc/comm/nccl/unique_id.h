// The id by which the ranks of an NCCL group find each other.
#pragma once

#include "comm/communicator.h"
#include "comm/nccl/api.h"
#include "comm/nccl/nccl.h"

namespace muster::comm::nccl {

/// Rank 0 makes the id; the others find it in the store. Throws CommError where NCCL cannot make one or the store holds
/// another group's, Timeout where rank 0 does not come.
UniqueId share_id(const NcclApi& nccl, c10d::Store& store, int first_rank, Milliseconds timeout);

}  // namespace muster::comm::nccl
