// What the folders of snapshots, and their files, are called.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace muster::checkpoint {

inline constexpr std::string_view kSnapshotPrefix = "snapshot-";

/// With zeros before it.
std::string padded(int64_t number, size_t digits);

/// That of a snapshot.
std::string name_of(int64_t number);

/// That of the snapshot whose folder this is, by its name; nothing for a name that name_of does not give.
std::optional<int64_t> number_of(const std::filesystem::path& snapshot);

/// The snapshots in a folder by number, ascending. Folders of names that no writer gives are none. Throws
/// std::filesystem::filesystem_error.
std::map<int64_t, std::filesystem::path> snapshots_in(const std::filesystem::path& folder);

/// That of the snapshot after those, from the number `least` on. Throws CheckpointError where there is no number left.
std::string next_name(const std::map<int64_t, std::filesystem::path>& earlier, int64_t least);

}  // namespace muster::checkpoint
