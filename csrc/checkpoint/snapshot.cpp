#include "checkpoint/snapshot.h"

#include <ATen/ops/cat.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/sha256.h"
#include "checkpoint/snapshot_names.h"
#include "core/log.h"
#include "muster/error.h"

namespace muster::checkpoint {

namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPartialPrefix = ".partial-";  // of a snapshot that is being written, before its name
constexpr std::string_view kRemovedPrefix = ".removed-";  // likewise, of one that is being removed
constexpr const char* kManifest = "manifest.json";
constexpr const char* kPartialManifest = ".partial-manifest.json";

// --- folders -------------------------------------------------------------------------------------------------------

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

// Those of snapshots alone: the folder may have files of others.
void remove_leftovers(const fs::path& folder) {
  std::vector<fs::path> leftovers;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename();
    for (const auto prefix : {kPartialPrefix, kRemovedPrefix}) {
      if (name.starts_with(std::string(prefix) + std::string(kSnapshotPrefix))) leftovers.push_back(entry.path());
    }
  }
  for (const auto& leftover : leftovers) fs::remove_all(leftover);
}

// --- shards --------------------------------------------------------------------------------------------------------

using TryAgain = std::function<bool(const Error&)>;

// What `write` gives, which is called again as often as the caller says.
template <class Write>
auto written(const fs::path& path, const TryAgain& try_again, const Write& write) {
  for (;;) {
    try {
      return write();
    } catch (const CheckpointError& error) {
      if (!try_again || !try_again(error)) throw;
      std::error_code ignored;  // what is there does not hinder it, or does again
      fs::remove(path, ignored);
    }
  }
}

// Tensors that wait for their file.
class ShardWriter {
 public:
  ShardWriter(fs::path folder, const SnapshotOptions& options)
      : folder_(std::move(folder)),
        shard_bytes_(options.shard_bytes),
        hashes_(options.secret.has_value()),
        try_again_(options.try_again) {}

  void add(NamedTensors tensors) {
    uint64_t more = 0;
    for (const auto& [name, tensor] : tensors) {
      check_storable(name, tensor);
      more += tensor.nbytes();
    }
    if (bytes_ + more > shard_bytes_) flush();
    tensors_.merge(tensors);
    if (!tensors.empty()) throw InvalidArgument("a snapshot was given two tensors '" + tensors.begin()->first + "'");
    bytes_ += more;
  }

  Manifest finish() {
    flush();
    return std::move(manifest_);
  }

 private:
  void flush() {
    if (tensors_.empty()) return;
    const size_t shard = manifest_.shards.size();
    const auto name = "shard-" + padded(static_cast<int64_t>(shard), 5) + ".safetensors";
    const auto sums =
        written(folder_ / name, try_again_, [&] { return write_safetensors(folder_ / name, tensors_, hashes_); });
    manifest_.shards.push_back({name, sums.file});
    for (const auto& [tensor_name, tensor] : tensors_) {
      const Piece whole{shard, tensor_name, 0, tensor.numel(), sums.crc32s.at(tensor_name)};
      manifest_.tensors.push_back({tensor_name, dtype_name(tensor.scalar_type()), tensor.sizes().vec(), {whole}});
    }
    tensors_.clear();
    bytes_ = 0;
  }

  const fs::path folder_;
  const uint64_t shard_bytes_;
  const bool hashes_;
  const TryAgain& try_again_;
  NamedTensors tensors_;
  uint64_t bytes_ = 0;  // of tensors_
  Manifest manifest_;
};

void write_into(const fs::path& folder, const Metadata& metadata, const NextTensors& next,
                const SnapshotOptions& options) {
  ShardWriter shards(folder, options);
  for (auto tensors = next(); !tensors.empty(); tensors = next()) shards.add(std::move(tensors));
  auto contents = shards.finish();
  contents.metadata = metadata;
  const auto manifest = manifest_of(contents, options.secret);
  written(folder / kManifest, options.try_again, [&] {
    FileWriter file(folder / kManifest);
    file.write(manifest.data(), manifest.size());
    file.finish();
    flush_folder(folder);
    return true;
  });
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

FileSum sum_of(const fs::path& path, bool hashes) {
  FileReader file(path, hashes);
  std::vector<std::byte> buffer(size_t{1} << 20);
  while (file.rest() > 0) file.read(buffer.data(), std::min<uint64_t>(file.rest(), buffer.size()));
  return file.sum();
}

// Whether a file is to be read with its SHA-256. A build without OpenSSL does with the CRC-32: with a secret it has
// not come so far.
bool has_hash(const Shard& shard) { return !shard.sum.sha256.empty() && has_sha256(); }

bool is_same(const FileSum& found, const FileSum& expected) {
  return found.bytes == expected.bytes && found.crc32 == expected.crc32 &&
         (found.sha256.empty() || found.sha256 == expected.sha256);
}

// Reads it to its end where this process has not yet.
bool is_good(const fs::path& snapshot, const std::optional<net::JobSecret>& secret) {
  {
    const std::lock_guard lock(known_good().mutex);
    if (known_good().paths.contains(fs::absolute(snapshot))) return true;
  }
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

}  // namespace

void sign_snapshot(const fs::path& snapshot, const net::JobSecret& secret) {
  auto manifest = read_manifest(snapshot / kManifest, std::nullopt);
  for (auto& shard : manifest.shards) {
    auto sum = sum_of(snapshot / shard.file, true);
    if (!is_same({sum.bytes, sum.crc32, shard.sum.sha256.empty() ? "" : sum.sha256}, shard.sum)) {
      throw CheckpointError("'" + (snapshot / shard.file).string() +
                            "' is damaged: its size or checksum is not that of the manifest; load another snapshot");
    }
    shard.sum = std::move(sum);
  }
  const auto text = manifest_of(manifest, secret);
  in_folder(snapshot, [&] {
    const auto partial = snapshot / kPartialManifest;
    fs::remove(partial);
    FileWriter file(partial);
    file.write(text.data(), text.size());
    file.finish();
    fs::rename(partial, snapshot / kManifest);
    flush_folder(snapshot);
    return true;
  });
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

namespace {

[[noreturn]] void fail_without_good(const fs::path& folder) {
  throw CheckpointError("no snapshot in '" + folder.string() +
                        "' is good; the warnings say what is wrong with each. Move them away to begin anew");
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

fs::path write_snapshot(const fs::path& folder, const Metadata& metadata, const NextTensors& next,
                        const SnapshotOptions& options) {
  if (options.keep && *options.keep < 1) {
    throw InvalidArgument("keep=" + std::to_string(*options.keep) + " would keep no snapshot; give at least 1");
  }
  return in_folder(folder, [&] {
    make_folder(folder);
    remove_leftovers(folder);
    const auto name = next_name(snapshots_in(folder));
    const auto partial = folder / (std::string(kPartialPrefix) + name);
    make_folder_in(folder, partial.filename());
    try {
      write_into(partial, metadata, next, options);
      fs::rename(partial, folder / name);
    } catch (...) {
      std::error_code ignored;  // the next writer removes what is left
      fs::remove_all(partial, ignored);
      throw;
    }
    flush_folder(folder);
    note_good(folder / name, true);
    if (options.keep) remove_surplus(folder, *options.keep, options.secret);
    return folder / name;
  });
}

fs::path write_snapshot(const fs::path& folder, const Snapshot& snapshot, const SnapshotOptions& options) {
  auto tensor = snapshot.tensors.begin();
  const auto next = [&] { return tensor == snapshot.tensors.end() ? NamedTensors() : NamedTensors{*tensor++}; };
  return write_snapshot(folder, snapshot.metadata, next, options);
}

SnapshotReader::SnapshotReader(fs::path folder, const std::optional<net::JobSecret>& secret)
    : folder_(std::move(folder)), manifest_(read_manifest(folder_ / kManifest, secret)) {
  note_pieces();
}

void SnapshotReader::note_pieces() {
  pieces_.resize(manifest_.shards.size());
  std::set<std::string> names;
  for (const auto& entry : manifest_.tensors) {
    if (!names.insert(entry.name).second) {
      throw CheckpointError("'" + (folder_ / kManifest).string() + "' is damaged: it has two tensors '" + entry.name +
                            "'; load another snapshot");
    }
    for (const auto& piece : entry.pieces) {
      if (!pieces_[piece.shard].emplace(piece.name, Place{&entry, &piece}).second) {
        fail(piece.shard, "it has two pieces '" + piece.name + "'");
      }
    }
  }
}

void SnapshotReader::fail(size_t shard, const std::string& what) const {
  throw CheckpointError("'" + (folder_ / manifest_.shards[shard].file).string() + "' is damaged: " + what +
                        "; load another snapshot");
}

void SnapshotReader::check(size_t shard, const NamedTensors& tensors, const TensorSums& sums) const {
  const auto& pieces = pieces_[shard];
  for (const auto& [name, tensor] : tensors) {
    const auto found = pieces.find(name);
    if (found == pieces.end()) fail(shard, "the manifest does not know its tensor '" + name + "'");
    const auto& [entry, piece] = found->second;
    if (sums.crc32s.at(name) != piece->crc32) fail(shard, "tensor '" + name + "' has another checksum");
    const bool is_whole = entry->pieces.size() == 1;
    if (dtype_name(tensor.scalar_type()) != entry->dtype || tensor.numel() != piece->count ||
        (is_whole && tensor.sizes() != at::IntArrayRef(entry->shape))) {
      fail(shard, "tensor '" + name + "' is not what the manifest says");
    }
  }
  if (tensors.size() != pieces.size()) fail(shard, "it lacks tensors");
  if (!is_same(sums.file, manifest_.shards[shard].sum)) fail(shard, "its size or checksum is not that of the manifest");
}

uint64_t SnapshotReader::bytes() const noexcept {
  uint64_t bytes = 0;
  for (const auto& shard : manifest_.shards) bytes += shard.sum.bytes;
  return bytes;
}

uint64_t SnapshotReader::bytes_read() const noexcept {
  uint64_t bytes = 0;
  for (size_t i = 0; i < next_; ++i) bytes += manifest_.shards[i].sum.bytes;
  return bytes;
}

std::optional<NamedTensors> SnapshotReader::next() {
  if (next_ == manifest_.shards.size()) {
    note_good(folder_, true);
    return std::nullopt;
  }
  const size_t shard = next_++;
  TensorSums sums;
  auto tensors = read_safetensors(folder_ / manifest_.shards[shard].file, sums, has_hash(manifest_.shards[shard]));
  check(shard, tensors, sums);
  return tensors;
}

Snapshot SnapshotReader::rest() {
  Snapshot snapshot{{}, metadata()};
  std::map<const Piece*, at::Tensor> pieces;  // of tensors that have several
  for (size_t shard = next_; auto tensors = next(); ++shard) {
    for (auto& [name, tensor] : *tensors) {
      const auto& [entry, piece] = pieces_[shard].at(name);
      if (entry->pieces.size() == 1) {
        snapshot.tensors.emplace(entry->name, std::move(tensor));
      } else {
        pieces.emplace(piece, tensor.flatten());
      }
    }
  }
  for (const auto& entry : manifest_.tensors) {
    if (entry.pieces.size() == 1) continue;
    std::vector<at::Tensor> parts;
    for (const auto& piece : entry.pieces) parts.push_back(std::move(pieces.extract(&piece).mapped()));
    snapshot.tensors.emplace(entry.name, at::cat(parts).view(entry.shape));
  }
  return snapshot;
}

Snapshot read_snapshot(const fs::path& folder) { return SnapshotReader(folder).rest(); }

bool read_newest_snapshot(const fs::path& folder, const std::function<void(SnapshotReader&)>& read) {
  const auto found =
      in_folder(folder, [&] { return fs::exists(folder) ? snapshots_in(folder) : std::map<int64_t, fs::path>(); });
  for (auto it = found.rbegin(); it != found.rend(); ++it) {
    try {
      SnapshotReader reader(it->second);
      read(reader);
      return true;
    } catch (const CheckpointError& error) {
      note_good(it->second, false);
      log(LogLevel::warning, "snapshot '" + it->second.string() + "' is passed over: " + error.what());
    }
  }
  if (found.empty()) return false;
  fail_without_good(folder);
}

std::vector<SnapshotInfo> list_snapshots(const fs::path& folder) {
  const auto found =
      in_folder(folder, [&] { return fs::exists(folder) ? snapshots_in(folder) : std::map<int64_t, fs::path>(); });
  std::vector<SnapshotInfo> good;
  const auto secret = net::job_secret();
  for (const auto& [number, path] : found) {
    try {
      good.push_back({path, read_manifest(path / kManifest, secret).metadata});
    } catch (const CheckpointError& error) {
      log(LogLevel::warning, "snapshot '" + path.string() + "' is passed over: " + error.what());
    }
  }
  if (good.empty() && !found.empty()) fail_without_good(folder);
  return good;
}

std::optional<StoredSnapshot> read_newest_snapshot(const fs::path& folder) {
  std::optional<StoredSnapshot> newest;
  read_newest_snapshot(folder, [&](SnapshotReader& reader) { newest = {reader.rest(), reader.folder()}; });
  return newest;
}

}  // namespace muster::checkpoint
