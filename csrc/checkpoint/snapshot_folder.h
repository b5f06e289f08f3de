// What is done to a folder of snapshots around their files: a snapshot is begun, becomes one, or is removed, at once.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>

#include "checkpoint/manifest.h"
#include "muster/error.h"
#include "net/job_secret.h"

namespace muster::checkpoint {

inline constexpr const char* kManifest = "manifest.json";
/// What the name of a part's manifest ends with, after its writer's.
inline constexpr const char* kPartSuffix = ".part.json";
/// The label of a part that says of which lineage it is (see JointSnapshot).
inline constexpr const char* kLineageLabel = "lineage";

/// What `call` gives; the system's errors are CheckpointError, naming the folder.
template <class Call>
auto in_folder(const std::filesystem::path& folder, const Call& call) {
  try {
    return call();
  } catch (const std::filesystem::filesystem_error& error) {
    throw CheckpointError("cannot use the folder '" + folder.string() + "' for snapshots: " + error.code().message() +
                          "; check its permissions and the space on its disk");
  }
}

/// As snapshots_in; none where there is no folder. Throws CheckpointError.
std::map<int64_t, std::filesystem::path> snapshots_found_in(const std::filesystem::path& folder);

/// Removes what dead writers of snapshots left in a folder, but for what is called `but`. What cannot be removed is
/// named in warnings.
void remove_leftovers(const std::filesystem::path& folder, const std::string& but = {});

/// Makes the folder of the snapshot with the next number, from `least` on, which is no snapshot yet, and removes what
/// dead writers left. Returns its path. Throws std::filesystem::filesystem_error, CheckpointError, also where `folder`
/// is not there, unless it makes that too.
std::filesystem::path begin_snapshot(const std::filesystem::path& folder, int64_t least = 1, bool makes_folder = true);

/// Makes such a folder, once it is whole, the snapshot, whose path it returns. Throws as begin_snapshot.
std::filesystem::path place_snapshot(const std::filesystem::path& begun);

/// Places the snapshot and makes that durable; then removes those of its folder that need not stay. Returns
/// the snapshot's path. Of old ones that cannot be removed a warning tells. Throws as begin_snapshot.
std::filesystem::path end_snapshot(const std::filesystem::path& begun, const std::optional<int>& keep,
                                   const std::optional<net::JobSecret>& secret);

/// What end_snapshot does after place_snapshot.
void settle_snapshot(const std::filesystem::path& placed, const std::optional<int>& keep,
                     const std::optional<net::JobSecret>& secret);

/// Removes what was begun and will be no snapshot. Never throws.
void drop_draft(const std::filesystem::path& draft) noexcept;

/// Remembers whether a snapshot, which this process wrote or has read whole, is good. Thread-safe.
void note_good(const std::filesystem::path& snapshot, bool is_good);
/// Whether it does. Thread-safe.
bool is_known_good(const std::filesystem::path& snapshot);

/// The sum of a file, which is read to its end. Throws CheckpointError.
FileSum sum_of(const std::filesystem::path& path, bool hashes);

/// Whether a file is to be read with its SHA-256. A build without OpenSSL does with the CRC-32: with a secret it has
/// not come so far.
bool has_hash(const Shard& shard);

/// Whether what was read of a file is what its manifest expects.
bool is_same(const FileSum& found, const FileSum& expected);

}  // namespace muster::checkpoint
