// Which snapshot a path asks for.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>

#include "checkpoint/snapshot.h"

namespace muster::checkpoint {

/// A value.
struct AskedSnapshot {
  std::filesystem::path folder;   ///< of snapshots
  std::optional<int64_t> number;  ///< empty: the newest good one
};

/// FOLDER asks for the newest, FOLDER/snapshot-0000000007 for that one, whether or not it is there. Throws
/// InvalidArgument for one snapshot under another name, which would be taken for a folder without any.
AskedSnapshot asked_snapshot(const std::filesystem::path& path);

/// Throws the CheckpointError of a snapshot that was asked for, where its folder has only those with other numbers.
[[noreturn]] void fail_without(const std::filesystem::path& snapshot, const std::set<int64_t>& others);

/// The snapshot that `path` asks for. The newest: as read_newest_snapshot. One: throws CheckpointError where it is not
/// there, and where it is damaged; no other is tried.
std::optional<StoredSnapshot> read_asked_snapshot(const std::filesystem::path& path, Memory memory);

}  // namespace muster::checkpoint
