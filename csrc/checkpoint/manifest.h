// What a snapshot's manifest.json says: its metadata, its files and its tensors, with their checksums. snapshot.h has
// the format.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "checkpoint/file.h"
#include "net/job_secret.h"

namespace muster::checkpoint {

/// Of the manifest; read_manifest refuses others.
inline constexpr int64_t kVersion = 2;

using Metadata = std::map<std::string, std::variant<std::string, int64_t, double>>;

/// A file of tensors.
struct Shard {
  std::string file;  ///< its name in the snapshot's folder
  FileSum sum;
  std::string host = {};  ///< the name of that on whose disk it was written; empty: the manifest's own
};

/// Whether a text may be a host's name: printable ASCII, 1 to 255 characters.
bool is_host_name(const std::string& text);

/// A run of a tensor's elements, in row-major order: a tensor of a file, which holds these alone.
struct Piece {
  size_t shard = 0;   ///< index among the manifest's
  std::string name;   ///< of the tensor in that file
  int64_t begin = 0;  ///< its first element's place among the whole's
  int64_t count = 0;
  uint32_t crc32 = 0;  ///< of its bytes
};

/// A tensor, wherever its pieces are.
struct TensorEntry {
  std::string name;
  std::string dtype;           ///< as safetensors names it
  std::vector<int64_t> shape;  ///< of the whole
  std::vector<Piece> pieces;   ///< one behind the other, all elements once
};

/// A value.
struct Manifest {
  Metadata metadata;
  std::vector<Shard> shards;
  std::vector<TensorEntry> tensors;
};

/// Whether the pieces of each tensor are all of it, or those of one writer among several, ascending. One is not signed
/// as the other.
enum class Pieces { all, some };

/// The text, signed with `secret` where there is one. Throws InvalidArgument for what is not UTF-8, NotBuilt where this
/// build cannot sign.
std::string manifest_of(const Manifest& manifest, const std::optional<net::JobSecret>& secret,
                        Pieces pieces = Pieces::all);

/// A manifest's file, to be parsed. Throws CheckpointError, naming the file, where it cannot be read, or is too long.
std::string manifest_text(const std::filesystem::path& path);

/// Of the text of the file at `path`. Throws CheckpointError, naming the file, if it is damaged or of another version,
/// where pieces do not cover their tensor, what is no host's name, and where `secret` is given and the manifest is not
/// signed with it; then NotBuilt where this build cannot tell.
Manifest parse_manifest(const std::string& text, const std::filesystem::path& path,
                        const std::optional<net::JobSecret>& secret, Pieces pieces = Pieces::all);

/// Both.
Manifest read_manifest(const std::filesystem::path& path, const std::optional<net::JobSecret>& secret,
                       Pieces pieces = Pieces::all);

}  // namespace muster::checkpoint
