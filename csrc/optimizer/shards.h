// Sharding of optimizer state (ZeRO stage 1: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training
// Trillion Parameter Models"): which elements a rank owns, and how the others get them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "comm/communicator.h"
#include "core/ownership.h"

namespace muster {

/// A rank's place among those that share the state; one rank owns everything. A value.
struct Shard {
  int rank = 0;
  int size = 1;
};

/// Divides the tiles (kernels::kTile elements) of all parameters, laid end to end, into `size` contiguous shards that
/// differ by at most one tile; the first ones take the extra. The run of each parameter that `shard` owns, or of that
/// the `part` which is divided likewise.
std::vector<Run> runs_of(const std::vector<int64_t>& numels, const Shard& shard, const Shard& part = {});

/// So many ranks that do not divide their shards, for OptimizerState::runs_for.
inline std::vector<int> undivided(int ranks) { return std::vector<int>(static_cast<size_t>(ranks), 1); }

/// Collective over `ranks`. memories[i] is one-dimensional, of one dtype for all i; runs[r][i] is what rank r owns of
/// it: every rank's runs go to all others, in pieces of a bounded size.
void exchange_runs(const std::vector<at::Tensor>& memories, const std::vector<std::vector<Run>>& runs,
                   comm::Communicator& ranks);

/// Likewise, for ranks whose operations are enqueued on devices: a run travels in place or, where it is small, packed
/// with others, and the host waits for nothing. `ranks` are this process's, and memories[l] those of the l-th. Two
/// packs of 32 MiB and a bit are in the memory of each device at once.
void broadcast_runs(const std::vector<std::vector<at::Tensor>>& memories, const std::vector<std::vector<Run>>& runs,
                    const std::vector<comm::CommunicatorPtr>& ranks);

}  // namespace muster
