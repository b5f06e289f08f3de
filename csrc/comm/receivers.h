// Who gets the result of a reduction.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace muster::comm {

/// Elements [begin, begin + count) of a tensor, in memory order, and the rank that gets them.
struct OwnedRun {
  int rank = 0;
  int64_t begin = 0;
  int64_t count = 0;
};

/// As one rank knows it. A value.
struct Receivers {
  /// False: this rank contributes, but its tensor is left unspecified, which saves the bandwidth of writing it
  /// (replicas of one process need the result once). Peers need not know.
  bool has_this = true;
  /// Not empty: each rank gets its own runs, and what else is in its tensor is left unspecified; what nobody gets does
  /// not travel where the backend can leave it out. Runs do not overlap, and agree over ranks.
  std::vector<OwnedRun> runs = {};

  /// Each rank its own of `runs`, as `rank` knows it.
  static Receivers owners(std::vector<OwnedRun> runs, int rank) {
    const bool has_this = std::any_of(runs.begin(), runs.end(), [rank](const auto& run) { return run.rank == rank; });
    return {has_this, std::move(runs)};
  }
};

}  // namespace muster::comm
