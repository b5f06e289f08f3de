// What a snapshot's manifest.json says: its metadata, and its files with their checksums. snapshot.h has the format.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "checkpoint/file.h"

namespace muster::checkpoint {

/// Of the manifest; read_manifest refuses others.
inline constexpr int64_t kVersion = 1;

using Metadata = std::map<std::string, std::variant<std::string, int64_t, double>>;

/// A file of tensors.
struct Shard {
  std::string file;  ///< its name in the snapshot's folder
  FileSum sum;
};

/// The text. Throws InvalidArgument for what is not UTF-8.
std::string manifest_of(const Metadata& metadata, const std::vector<Shard>& shards);

/// Sets `metadata`, and returns the shards in their order. Throws CheckpointError, naming the file, if it is damaged or
/// of another version.
std::vector<Shard> read_manifest(const std::filesystem::path& path, Metadata& metadata);

}  // namespace muster::checkpoint
