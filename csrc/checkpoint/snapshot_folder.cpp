#include "checkpoint/snapshot_folder.h"

#include <algorithm>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "checkpoint/sha256.h"
#include "checkpoint/snapshot.h"
#include "checkpoint/snapshot_names.h"
#include "core/log.h"

namespace muster::checkpoint {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPartialPrefix = ".partial-";  // of a snapshot that is being written, before its name
constexpr std::string_view kRemovedPrefix = ".removed-";  // likewise, of one that is being removed

// Snapshots that this process wrote, or has read whole.
struct KnownGood {
  std::mutex mutex;
  std::set<fs::path> paths;  // guarded by mutex
};

KnownGood& known_good() {
  static KnownGood known;
  return known;
}

// Reads it to its end where this process has not yet.
bool is_good(const fs::path& snapshot, const std::optional<net::JobSecret>& secret) {
  if (is_known_good(snapshot)) return true;
  try {
    for (const auto& shard : read_manifest(snapshot / kManifest, secret).shards) {
      if (!is_same(sum_of(snapshot / shard.file, has_hash(shard)), shard.sum)) return false;
    }
    note_good(snapshot, true);
    return true;
  } catch (const CheckpointError&) {
    return false;
  }
}

// The newest good ones stay, as many as `keep` says, and what is newer than the oldest of them.
void remove_surplus(const fs::path& folder, int64_t keep, const std::optional<net::JobSecret>& secret) {
  const auto found = snapshots_in(folder);
  int64_t kept = 0;
  for (auto it = found.rbegin(); it != found.rend(); ++it) {
    if (kept == keep) {
      remove_snapshot(it->second);
    } else if (is_good(it->second, secret)) {
      ++kept;
    }
  }
}

}  // namespace

std::map<int64_t, fs::path> snapshots_found_in(const fs::path& folder) {
  return in_folder(folder, [&] { return fs::exists(folder) ? snapshots_in(folder) : std::map<int64_t, fs::path>(); });
}

// Those of snapshots alone: the folder may have files of others.
void remove_leftovers(const fs::path& folder, const std::string& but) {
  std::vector<fs::path> leftovers;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    for (const auto prefix : {kPartialPrefix, kRemovedPrefix}) {
      const bool is_left = name.starts_with(std::string(prefix) + std::string(kSnapshotPrefix)) && name != but;
      if (is_left) leftovers.push_back(entry.path());
    }
  }
  for (const auto& leftover : leftovers) {
    std::error_code error;
    fs::remove_all(leftover, error);
    if (!error) continue;
    log(LogLevel::warning, "what a writer left in '" + folder.string() + "' cannot be removed: " + error.message());
  }
}

// With a random end: what was begun before and given up may still be written to.
fs::path begin_snapshot(const fs::path& folder, int64_t least, bool makes_folder) {
  if (makes_folder) make_folder(folder);
  remove_leftovers(folder);
  std::random_device random;
  const auto begun =
      std::string(kPartialPrefix) + next_name(snapshots_in(folder), least) + '-' + std::to_string(random());
  make_folder_in(folder, begun);
  return folder / begun;
}

fs::path place_snapshot(const fs::path& begun) {
  const auto name = begun.filename().string();
  auto snapshot = begun.parent_path() / name.substr(kPartialPrefix.size(), name.rfind('-') - kPartialPrefix.size());
  fs::rename(begun, snapshot);
  return snapshot;
}

fs::path end_snapshot(const fs::path& begun, const std::optional<int>& keep,
                      const std::optional<net::JobSecret>& secret) {
  auto snapshot = place_snapshot(begun);
  settle_snapshot(snapshot, keep, secret);
  return snapshot;
}

void settle_snapshot(const fs::path& placed, const std::optional<int>& keep,
                     const std::optional<net::JobSecret>& secret) {
  const auto folder = placed.parent_path();
  flush_folder(folder);
  note_good(placed, true);
  try {
    if (keep) remove_surplus(folder, *keep, secret);
  } catch (const std::exception& error) {  // the new one is there
    log(LogLevel::warning, "old snapshots in '" + folder.string() + "' stay: " + error.what());
  }
}

// Renamed first: a snapshot that is being removed is not there.
void remove_snapshot(const fs::path& snapshot) {
  in_folder(snapshot, [&] {
    const auto aside = snapshot.parent_path() / (std::string(kRemovedPrefix) + snapshot.filename().string());
    fs::remove_all(aside);
    fs::rename(snapshot, aside);
    fs::remove_all(aside);
    return true;
  });
  note_good(snapshot, false);
}

bool is_known_good(const fs::path& snapshot) {
  const std::lock_guard lock(known_good().mutex);
  return known_good().paths.contains(fs::absolute(snapshot));
}

void note_good(const fs::path& snapshot, bool is_good) {
  const std::lock_guard lock(known_good().mutex);
  if (is_good) {
    known_good().paths.insert(fs::absolute(snapshot));
  } else {
    known_good().paths.erase(fs::absolute(snapshot));
  }
}

void drop_draft(const fs::path& draft) noexcept {
  std::error_code ignored;  // the next writer removes what is left
  fs::remove_all(draft, ignored);
}

FileSum sum_of(const fs::path& path, bool hashes) {
  FileReader file(path, hashes);
  std::vector<std::byte> buffer(size_t{1} << 20);
  while (file.rest() > 0) file.read(buffer.data(), std::min<uint64_t>(file.rest(), buffer.size()));
  return file.sum();
}

bool has_hash(const Shard& shard) { return !shard.sum.sha256.empty() && has_sha256(); }

bool is_same(const FileSum& found, const FileSum& expected) {
  return found.bytes == expected.bytes && found.crc32 == expected.crc32 &&
         (found.sha256.empty() || found.sha256 == expected.sha256);
}

}  // namespace muster::checkpoint
