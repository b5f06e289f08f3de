// Snapshots: named tensors and typed metadata in a folder. Either a snapshot is there whole or it is not there.
//
//   FOLDER/snapshot-0000000007/manifest.json
//   FOLDER/snapshot-0000000007/shard-00000.safetensors ...
//
// The manifest, {"crc32": "<8 hex digits>", "manifest": {...}}, holds the checksum (CRC-32) of its own inner object as
// it stands there, and of every shard. Inside: "version" (kVersion); "strings", "int64s" and "doubles", the metadata by
// type (doubles as the shortest decimals that read back as the same value, in strings: JSON has no infinities);
// "shards", each with "file", "bytes" and "crc32". Numbers of snapshots grow: the highest is the newest.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <variant>

#include "checkpoint/safetensors.h"

namespace muster::checkpoint {

/// Of the manifest; read_snapshot refuses others.
inline constexpr int64_t kVersion = 1;

using Metadata = std::map<std::string, std::variant<std::string, int64_t, double>>;

/// A value.
struct Snapshot {
  NamedTensors tensors;
  Metadata metadata;
};

struct SnapshotOptions {
  std::optional<int> keep = {};              ///< how many of the newest good ones stay; empty: all
  uint64_t shard_bytes = uint64_t{1} << 30;  ///< tensors go to one file up to this; a larger one has its own
};

/// Writes a snapshot with the next number, then removes those that need not stay, and what dead writers left. Returns
/// its folder. A folder has one writer at a time. Blocks until all is on the disk. Throws InvalidArgument for tensors
/// that cannot be stored (check_storable) and text that is not UTF-8, CheckpointError where the system refuses; what
/// was there stays.
std::filesystem::path write_snapshot(const std::filesystem::path& folder, const Snapshot& snapshot,
                                     const SnapshotOptions& options);

/// One snapshot's folder. Throws CheckpointError, naming the file, if anything of it is damaged or of another version.
Snapshot read_snapshot(const std::filesystem::path& folder);

/// The newest good snapshot; nothing where there is none at all, or no folder. Each damaged one is named in a warning
/// and passed over; throws CheckpointError if that leaves none.
std::optional<Snapshot> read_newest_snapshot(const std::filesystem::path& folder);

}  // namespace muster::checkpoint
