#include "checkpoint/asked_snapshot.h"

#include <algorithm>
#include <charconv>
#include <string>
#include <system_error>

#include "checkpoint/snapshot_folder.h"
#include "checkpoint/snapshot_names.h"
#include "muster/error.h"

namespace muster::checkpoint {

namespace {

namespace fs = std::filesystem;

bool is_prefixed(const fs::path& path) { return path.filename().string().starts_with(kSnapshotPrefix); }

// What FOLDER/7, or FOLDER/snapshot-7, is short for; nothing for other names.
std::optional<fs::path> written_out(const fs::path& path) {
  const auto name = path.filename().string().substr(is_prefixed(path) ? kSnapshotPrefix.size() : 0);
  int64_t number = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
  if (name.empty() || error != std::errc() || end != name.data() + name.size() || number < 1) return std::nullopt;
  return path.parent_path() / name_of(number);
}

}  // namespace

AskedSnapshot asked_snapshot(const fs::path& path) {
  auto named = path.lexically_normal();
  if (!named.has_filename()) named = named.parent_path();
  if (const auto number = number_of(named)) {
    return {named.has_parent_path() ? named.parent_path() : fs::path("."), number};
  }
  std::error_code ignored;  // of a folder that cannot be looked into: said where it is read
  if (fs::exists(named / kManifest, ignored)) {
    throw InvalidArgument("'" + path.string() + "' is one checkpoint, and not called as one; call its folder " +
                          name_of(1) + " to load it, or give load() the folder that save() wrote");
  }
  const auto whole = written_out(named);
  if (whole && !fs::exists(named, ignored) && (fs::exists(*whole, ignored) || is_prefixed(named))) {
    throw InvalidArgument("'" + path.string() + "' is not there, and load() takes no short names; give it '" +
                          whole->string() + "' for that checkpoint");
  }
  return {path, std::nullopt};
}

void fail_without(const fs::path& snapshot, const std::set<int64_t>& others) {
  const auto there = others.empty() ? std::string("there is none at all")
                                    : "the last one there is '" + name_of(*others.rbegin()) + "', the first one '" +
                                          name_of(*others.begin()) + "'";
  throw CheckpointError("there is no checkpoint '" + snapshot.string() + "'; " + there);
}

std::optional<StoredSnapshot> read_asked_snapshot(const fs::path& path, Memory memory) {
  const auto asked = asked_snapshot(path);
  if (!asked.number) return read_newest_snapshot(path, memory);
  const auto found = snapshots_found_in(asked.folder);
  const auto snapshot = found.find(*asked.number);
  if (snapshot == found.end()) {
    std::set<int64_t> others;
    for (const auto& [number, folder] : found) others.insert(number);
    fail_without(asked.folder / name_of(*asked.number), others);
  }
  return StoredSnapshot{read_snapshot(snapshot->second, memory), snapshot->second};
}

}  // namespace muster::checkpoint
