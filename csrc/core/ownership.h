// Ownership: which rank owns which elements, where ranks divide the work on a layout.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "core/flat_layout.h"

namespace muster {

/// Elements [begin, begin + count) of one parameter, in memory order.
struct Run {
  int64_t begin = 0;
  int64_t count = 0;
};

/// What each rank steps of each parameter: [rank][parameter], in real numbers. Runs of a parameter are in order of
/// ranks, and cover it once.
using Shards = std::vector<std::vector<Run>>;

/// These elements of a dense tensor: 1-dim, sharing its memory.
at::Tensor elements_of(const at::Tensor& dense, const Run& run);

/// Divides every bucket into contiguous shares, as equal as cuts at multiples of `tile` elements of a parameter allow;
/// element [p][rank] is what `rank` owns of the layout's parameter p. Every element has one owner.
std::vector<std::vector<Run>> owned_runs(const FlatLayout& layout, int ranks, int64_t tile);

/// The same for one parameter of `numel` elements that is in no bucket; by rank.
std::vector<Run> owned_runs(int64_t numel, int ranks, int64_t tile);

}  // namespace muster
