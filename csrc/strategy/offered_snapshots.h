// The snapshots that the hosts of a job's workers have in their folders, in the order in which they are tried.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "comm/communicator.h"

namespace muster {

/// One of which some worker has the manifest.
struct OfferedSnapshot {
  int64_t number = 0;
  std::string sum;             ///< tells its manifest from others of this number
  int rank = 0;                ///< the first one that has it
  int64_t steps = -1;          ///< that were made; -1 where it is not known
  std::string lineage = {};    ///< where its manifest has none, its host's own; empty where it is not known
  std::string token = {};      ///< in the names of parts that are on other hosts than the manifest; empty: none
  bool is_known_good = false;  ///< to the chief
  bool is_foreign = false;     ///< of another lineage than what the chief's host has, and not there: never taken
};

/// Equal on all workers. A value.
struct OfferedSnapshots {
  std::vector<OfferedSnapshot> in_order;  ///< see gathered_snapshot.h
  std::vector<std::string> hosts;         ///< their names by rank
  /// Ranks that have parts, without their manifest, of the snapshot with this number and token.
  std::map<std::pair<int64_t, std::string>, std::set<int>> parts;
};

/// Where others than the chief may not look, they have none. Throws CheckpointError on all where the chief cannot use
/// the folder. Collective.
OfferedSnapshots offered_snapshots(comm::Communicator& workers, const std::filesystem::path& folder);

/// Remembers that all of a snapshot is good on the hosts, on the chief.
void note_known_good(const std::filesystem::path& folder, const OfferedSnapshot& snapshot);

/// Names in warnings the host that has what is taken (null: nothing is), one of `offered`, where it is not the chief's,
/// and what such hosts have that is newer.
void warn_of_other_hosts(const std::filesystem::path& folder, const OfferedSnapshots& offered,
                         const OfferedSnapshot* taken);

}  // namespace muster
