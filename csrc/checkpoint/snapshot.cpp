#include "checkpoint/snapshot.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <functional>
#include <mutex>
#include <set>
#include <string_view>
#include <vector>

#include "checkpoint/crc32.h"
#include "checkpoint/json.h"
#include "core/log.h"
#include "muster/error.h"

namespace muster::checkpoint {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPrefix = "snapshot-";
constexpr std::string_view kPartialPrefix = ".partial-";  // of a snapshot that is being written, before its name
constexpr std::string_view kRemovedPrefix = ".removed-";  // likewise, of one that is being removed
constexpr const char* kManifest = "manifest.json";
constexpr size_t kDigits = 10;
// 2 million shards; a longer one was not written here.
constexpr uint64_t kMaxManifestBytes = uint64_t{1} << 27;

struct Shard {
  std::string file;
  FileSum sum;
};

std::string padded(int64_t number, size_t digits) {
  const auto text = std::to_string(number);
  return std::string(digits - std::min(digits, text.size()), '0') + text;
}

std::string hex_of(uint32_t value) {
  char text[9];
  std::snprintf(text, sizeof(text), "%08x", value);
  return text;
}

// --- folders -------------------------------------------------------------------------------------------------------

std::optional<int64_t> number_of(const fs::path& folder) {
  const auto name = folder.filename().string();
  if (!name.starts_with(kPrefix)) return std::nullopt;
  int64_t number = 0;
  const char* const end = name.data() + name.size();
  const auto [stop, error] = std::from_chars(name.data() + kPrefix.size(), end, number);
  if (error != std::errc() || stop != end || number < 0) return std::nullopt;
  return number;
}

// The system's errors as ours.
template <class Call>
auto in_folder(const fs::path& folder, const Call& call) {
  try {
    return call();
  } catch (const fs::filesystem_error& error) {
    throw CheckpointError("cannot use the folder '" + folder.string() + "' for snapshots: " + error.code().message() +
                          "; check its permissions and the space on its disk");
  }
}

// A folder whose name a crash could take away holds nothing durable.
void make_folder(const fs::path& folder) {
  if (folder.empty() || fs::is_directory(folder)) return;
  const auto parent = folder.parent_path();
  make_folder(parent);
  fs::create_directory(folder);
  flush_folder(parent.empty() ? "." : parent);
}

// By number, ascending.
std::map<int64_t, fs::path> snapshots_in(const fs::path& folder) {
  std::map<int64_t, fs::path> found;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (const auto number = number_of(entry.path())) found.emplace(*number, entry.path());
  }
  return found;
}

// Renamed first: a snapshot that is being removed is not there.
void remove_snapshot(const fs::path& snapshot) {
  const auto aside = snapshot.parent_path() / (std::string(kRemovedPrefix) + snapshot.filename().string());
  fs::remove_all(aside);
  fs::rename(snapshot, aside);
  fs::remove_all(aside);
}

// Those of snapshots alone: the folder may have files of others.
void remove_leftovers(const fs::path& folder) {
  std::vector<fs::path> leftovers;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    for (const auto prefix : {kPartialPrefix, kRemovedPrefix}) {
      if (name.starts_with(std::string(prefix) + std::string(kPrefix))) leftovers.push_back(entry.path());
    }
  }
  for (const auto& leftover : leftovers) fs::remove_all(leftover);
}

// --- the manifest --------------------------------------------------------------------------------------------------

template <class T>
std::string members(const Metadata& metadata, const std::function<std::string(const T&)>& text_of) {
  std::string text = "{";
  for (const auto& [key, value] : metadata) {
    const T* own = std::get_if<T>(&value);
    if (own == nullptr) continue;
    if (text.size() > 1) text += ',';
    text += json_string(key) + ':' + text_of(*own);
  }
  return text + '}';
}

std::string decimal(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof(text), value).ptr};
}

std::string manifest_of(const Metadata& metadata, const std::vector<Shard>& shards) {
  std::string text = "{\"version\":" + std::to_string(kVersion);
  text += ",\"strings\":" + members<std::string>(metadata, [](const std::string& value) { return json_string(value); });
  text += ",\"int64s\":" + members<int64_t>(metadata, [](int64_t value) { return std::to_string(value); });
  text += ",\"doubles\":" + members<double>(metadata, [](double value) { return json_string(decimal(value)); });
  text += ",\"shards\":[";
  for (const auto& shard : shards) {
    if (text.back() != '[') text += ',';
    text += "{\"file\":" + json_string(shard.file) + ",\"bytes\":" + std::to_string(shard.sum.bytes) + ",\"crc32\":\"" +
            hex_of(shard.sum.crc32) + "\"}";
  }
  text += "]}";
  return "{\"crc32\":\"" + hex_of(crc32(text.data(), text.size())) + "\",\"manifest\":" + text + "}\n";
}

uint32_t read_crc32(JsonReader& json) {
  const auto text = json.read_string();
  uint32_t value = 0;
  if (text.size() != 8 || std::from_chars(text.data(), text.data() + 8, value, 16).ptr != text.data() + 8) {
    json.fail("expected a checksum of 8 hexadecimal digits");
  }
  return value;
}

double read_double(JsonReader& json) {
  const auto text = json.read_string();
  double value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) json.fail("expected a decimal number");
  return value;
}

// A name in the snapshot's own folder.
std::string read_file_name(JsonReader& json) {
  auto name = json.read_string();
  if (name.empty() || name.find_first_of(std::string_view("/\0", 2)) != std::string::npos || name.starts_with('.')) {
    json.fail("what is no name of a shard");
  }
  return name;
}

Shard read_shard(JsonReader& json) {
  Shard shard;
  int seen = 0;
  json.read_object([&](const std::string& key) {
    ++seen;
    if (key == "file") {
      shard.file = read_file_name(json);
    } else if (key == "bytes") {
      shard.sum.bytes = static_cast<uint64_t>(json.read_integer());
    } else if (key == "crc32") {
      shard.sum.crc32 = read_crc32(json);
    } else {
      json.fail("a shard has an unknown property '" + key + "'");
    }
  });
  if (seen != 3) json.fail("a shard lacks its file, bytes or checksum");
  return shard;
}

template <class Read>
void read_members(JsonReader& json, Metadata& metadata, const Read& read) {
  json.read_object([&](const std::string& key) {
    if (!metadata.emplace(key, read()).second) json.fail("'" + key + "' comes twice in the metadata");
  });
}

void read_inner(JsonReader& json, Metadata& metadata, std::vector<Shard>& shards) {
  int64_t version = 0;
  json.read_object([&](const std::string& key) {
    if (key == "version") {
      version = json.read_integer();
      if (version != kVersion) {
        json.fail("its version is " + std::to_string(version) + " and this Muster reads " + std::to_string(kVersion));
      }
    } else if (version == 0) {
      json.fail("expected the version first");
    } else if (key == "strings") {
      read_members(json, metadata, [&] { return json.read_string(); });
    } else if (key == "int64s") {
      read_members(json, metadata, [&] { return json.read_integer(); });
    } else if (key == "doubles") {
      read_members(json, metadata, [&] { return read_double(json); });
    } else if (key == "shards") {
      json.read_array([&] { shards.push_back(read_shard(json)); });
    } else {
      json.fail("an unknown property '" + key + "'");
    }
  });
  if (version == 0) json.fail("it has no version");
}

std::vector<Shard> read_manifest(const fs::path& path, Metadata& metadata) {
  FileReader file(path);
  if (file.size() > kMaxManifestBytes) {
    throw CheckpointError("'" + path.string() + "' is too long for a manifest; load another snapshot");
  }
  const auto text = file.read_text(file.size());
  JsonReader json(text, path.string());
  std::vector<Shard> shards;
  std::optional<uint32_t> expected;
  bool has_manifest = false;
  json.read_object([&](const std::string& key) {
    if (key == "crc32") {
      expected = read_crc32(json);
    } else if (key == "manifest" && expected) {
      const size_t begin = json.position();
      read_inner(json, metadata, shards);
      if (crc32(text.data() + begin, json.position() - begin) != *expected) json.fail("its checksum differs");
      has_manifest = true;
    } else {
      json.fail("an unknown property '" + key + "'");
    }
  });
  json.read_end();
  if (!has_manifest) json.fail("it holds no manifest");
  return shards;
}

// Tensors in the order of their names.
std::vector<NamedTensors> divide(const NamedTensors& tensors, uint64_t shard_bytes) {
  std::vector<NamedTensors> shards;
  uint64_t bytes = 0;
  for (const auto& [name, tensor] : tensors) {
    check_storable(name, tensor);
    if (shards.empty() || bytes + tensor.nbytes() > shard_bytes) {
      shards.emplace_back();
      bytes = 0;
    }
    shards.back().emplace(name, tensor);
    bytes += tensor.nbytes();
  }
  return shards;
}

void write_into(const fs::path& folder, const Snapshot& snapshot, const SnapshotOptions& options) {
  std::vector<Shard> shards;
  for (const auto& tensors : divide(snapshot.tensors, options.shard_bytes)) {
    const auto name = "shard-" + padded(static_cast<int64_t>(shards.size()), 5) + ".safetensors";
    shards.push_back({name, write_safetensors(folder / name, tensors)});
  }
  const auto manifest = manifest_of(snapshot.metadata, shards);
  FileWriter file(folder / kManifest);
  file.write(manifest.data(), manifest.size());
  file.finish();
  flush_folder(folder);
}

// Snapshots that this process wrote, or has read whole.
struct KnownGood {
  std::mutex mutex;
  std::set<fs::path> paths;  // guarded by mutex
};

KnownGood& known_good() {
  static KnownGood known;
  return known;
}

void note_good(const fs::path& snapshot, bool is_good) {
  const std::lock_guard lock(known_good().mutex);
  if (is_good) {
    known_good().paths.insert(fs::absolute(snapshot));
  } else {
    known_good().paths.erase(fs::absolute(snapshot));
  }
}

FileSum sum_of(const fs::path& path) {
  FileReader file(path);
  std::vector<std::byte> buffer(size_t{1} << 20);
  while (file.rest() > 0) file.read(buffer.data(), std::min<uint64_t>(file.rest(), buffer.size()));
  return file.sum();
}

// Reads it to its end where this process has not yet.
bool is_good(const fs::path& snapshot) {
  {
    const std::lock_guard lock(known_good().mutex);
    if (known_good().paths.contains(fs::absolute(snapshot))) return true;
  }
  try {
    Metadata metadata;
    for (const auto& shard : read_manifest(snapshot / kManifest, metadata)) {
      if (sum_of(snapshot / shard.file) != shard.sum) return false;
    }
    note_good(snapshot, true);
    return true;
  } catch (const CheckpointError&) {
    return false;
  }
}

// The newest good ones stay, as many as `keep` says, and what is newer than the oldest of them.
void remove_surplus(const fs::path& folder, int64_t keep) {
  const auto found = snapshots_in(folder);
  int64_t kept = 0;
  for (auto it = found.rbegin(); it != found.rend(); ++it) {
    if (kept == keep) {
      remove_snapshot(it->second);
      note_good(it->second, false);
    } else if (is_good(it->second)) {
      ++kept;
    }
  }
}

}  // namespace

fs::path write_snapshot(const fs::path& folder, const Snapshot& snapshot, const SnapshotOptions& options) {
  if (options.keep && *options.keep < 1) {
    throw InvalidArgument("keep=" + std::to_string(*options.keep) + " would keep no snapshot; give at least 1");
  }
  return in_folder(folder, [&] {
    make_folder(folder);
    remove_leftovers(folder);
    const auto earlier = snapshots_in(folder);
    const auto number = earlier.empty() ? 1 : earlier.rbegin()->first + 1;
    const auto name = std::string(kPrefix) + padded(number, kDigits);
    const auto partial = folder / (std::string(kPartialPrefix) + name);
    fs::create_directory(partial);
    try {
      write_into(partial, snapshot, options);
      fs::rename(partial, folder / name);
    } catch (...) {
      std::error_code ignored;  // the next writer removes what is left
      fs::remove_all(partial, ignored);
      throw;
    }
    flush_folder(folder);
    note_good(folder / name, true);
    if (options.keep) remove_surplus(folder, *options.keep);
    return folder / name;
  });
}

Snapshot read_snapshot(const fs::path& folder) {
  Snapshot snapshot;
  for (const auto& shard : read_manifest(folder / kManifest, snapshot.metadata)) {
    FileSum sum;
    auto tensors = read_safetensors(folder / shard.file, sum);
    if (sum != shard.sum) {
      throw CheckpointError("'" + (folder / shard.file).string() +
                            "' is damaged: its size or checksum is not that of the manifest; load another snapshot");
    }
    snapshot.tensors.merge(tensors);
    if (!tensors.empty()) {
      throw CheckpointError("'" + folder.string() + "' is damaged: two shards hold tensor '" + tensors.begin()->first +
                            "'; load another snapshot");
    }
  }
  note_good(folder, true);
  return snapshot;
}

std::optional<Snapshot> read_newest_snapshot(const fs::path& folder) {
  const auto found =
      in_folder(folder, [&] { return fs::exists(folder) ? snapshots_in(folder) : std::map<int64_t, fs::path>(); });
  for (auto it = found.rbegin(); it != found.rend(); ++it) {
    try {
      return read_snapshot(it->second);
    } catch (const CheckpointError& error) {
      note_good(it->second, false);
      log(LogLevel::warning, "snapshot '" + it->second.string() + "' is passed over: " + error.what());
    }
  }
  if (found.empty()) return std::nullopt;
  throw CheckpointError("no snapshot in '" + folder.string() +
                        "' is good; the warnings say what is wrong with each. Move them away to begin anew");
}

}  // namespace muster::checkpoint
