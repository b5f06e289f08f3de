#include "checkpoint/snapshot.h"

#include <ATen/ops/cat.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/shard_writer.h"
#include "checkpoint/snapshot_folder.h"
#include "checkpoint/snapshot_names.h"
#include "core/log.h"
#include "muster/error.h"

namespace muster::checkpoint {

namespace {

namespace fs = std::filesystem;

constexpr const char* kPartialManifest = ".partial-manifest.json";

Manifest read_own_manifest(const fs::path& snapshot, const std::optional<net::JobSecret>& secret) {
  if (is_part_of_snapshot(snapshot)) {
    throw CheckpointError("'" + snapshot.string() +
                          "' is one host's part of a snapshot, whose manifest is on another host; copy the folders of "
                          "all hosts that wrote it into one");
  }
  return read_manifest(snapshot / kManifest, secret);
}

// A file that is not here is asked for where it was written.
void check_is_here(const fs::path& file, const Shard& shard) {
  std::error_code ignored;
  if (shard.host.empty() || fs::exists(file, ignored)) return;
  throw CheckpointError("'" + file.string() + "' is not here: it was written on host '" + shard.host +
                        "'; copy what that host has in its folder into this one, or load on the hosts that wrote it");
}

Run whole_run(const NamedTensors::value_type& named) { return Run::whole(named.first, named.second); }

}  // namespace

bool is_part_of_snapshot(const fs::path& folder) {
  std::error_code ignored;
  const auto is_part = [](const fs::path& file) { return file.filename().string().ends_with(kPartSuffix); };
  return !fs::exists(folder / kManifest, ignored) &&
         std::ranges::any_of(fs::directory_iterator(folder, ignored), is_part);
}

void sign_snapshot(const fs::path& snapshot, const net::JobSecret& secret) {
  auto manifest = read_manifest(snapshot / kManifest, std::nullopt);
  for (auto& shard : manifest.shards) {
    check_is_here(snapshot / shard.file, shard);
    auto sum = sum_of(snapshot / shard.file, true);
    if (!is_same({sum.bytes, sum.crc32, shard.sum.sha256.empty() ? "" : sum.sha256}, shard.sum)) {
      throw CheckpointError("'" + (snapshot / shard.file).string() +
                            "' is damaged: its size or checksum is not that of the manifest; load another snapshot");
    }
    shard.sum = std::move(sum);
  }
  in_folder(snapshot, [&] {
    const auto partial = snapshot / kPartialManifest;
    fs::remove(partial);
    write_manifest(partial, manifest, {.secret = secret});
    fs::rename(partial, snapshot / kManifest);
    flush_folder(snapshot);
    return true;
  });
}

void fail_without_good(const fs::path& folder) {
  throw CheckpointError("no snapshot in '" + folder.string() +
                        "' is good; the warnings say what is wrong with each. Move them away to begin anew");
}

void check_keep(const std::optional<int>& keep) {
  if (!keep || *keep >= 1) return;
  throw InvalidArgument("keep=" + std::to_string(*keep) + " would keep no snapshot; give at least 1");
}

fs::path write_snapshot(const fs::path& folder, const Metadata& metadata, const NextTensors& next,
                        const SnapshotOptions& options) {
  check_keep(options.keep);
  const auto in_it = [&](const SnapshotOptions& how, const auto& call) {
    return tried_again(how, [&] { return in_folder(folder, call); });
  };
  const auto begun = in_it(options, [&] { return begin_snapshot(folder, options.least, options.makes_folder); });
  try {
    auto in_draft = options;
    in_draft.try_again = [&](const Error& error) {
      std::error_code ignored;  // a draft that is lost does not come again
      return options.try_again && options.try_again(error) && fs::exists(begun, ignored);
    };
    ShardWriter shards(begun, "shard-", in_draft);
    for (auto tensors = next(); !tensors.empty(); tensors = next()) {
      std::vector<Run> runs;
      std::ranges::transform(std::exchange(tensors, {}), std::back_inserter(runs), whole_run);
      shards.add(std::move(runs));
    }
    auto manifest = shards.finish();
    manifest.metadata = metadata;
    write_manifest(begun / kManifest, manifest, in_draft);
    const auto placed = in_it(in_draft, [&] { return place_snapshot(begun); });
    in_it(options, [&] { settle_snapshot(placed, options.keep, options.secret); });
    return placed;
  } catch (...) {
    drop_draft(begun);
    throw;
  }
}

fs::path write_snapshot(const fs::path& folder, const Snapshot& snapshot, const SnapshotOptions& options) {
  auto tensor = snapshot.tensors.begin();
  const auto next = [&] { return tensor == snapshot.tensors.end() ? NamedTensors() : NamedTensors{*tensor++}; };
  return write_snapshot(folder, snapshot.metadata, next, options);
}

SnapshotReader::SnapshotReader(const fs::path& folder, const std::optional<net::JobSecret>& secret, Memory memory)
    : SnapshotReader(folder, read_own_manifest(folder, secret), memory) {}

SnapshotReader::SnapshotReader(fs::path folder, Manifest manifest, Memory memory)
    : folder_(std::move(folder)), manifest_(std::move(manifest)), memory_(memory) {
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
  if (auto given = given_.extract(shard)) return std::move(given.mapped());
  return read(shard);
}

NamedTensors SnapshotReader::read(size_t shard) const {
  const auto& expected = manifest_.shards[shard];
  const auto file = folder_ / expected.file;
  check_is_here(file, expected);
  TensorSums sums;
  auto tensors = read_safetensors(file, sums, has_hash(expected), memory_);
  check(shard, tensors, sums);
  return tensors;
}

std::vector<std::string> SnapshotReader::names_in(size_t shard) const {
  std::vector<std::string> names;
  for (const auto& [name, place] : pieces_[shard]) names.push_back(name);
  return names;
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

Snapshot read_snapshot(const fs::path& folder, Memory memory) {
  return SnapshotReader(folder, net::job_secret(), memory).rest();
}

CheckedSnapshot check_snapshot(const fs::path& folder) {
  const SnapshotReader reader(folder, net::job_secret(), Memory::of_file);
  CheckedSnapshot checked{reader.metadata(), {}};
  std::error_code ignored;
  for (size_t shard = 0; shard < reader.shards().size(); ++shard) {
    const auto& [file, sum, host] = reader.shards()[shard];
    if (host.empty() || fs::exists(folder / file, ignored)) {
      reader.read(shard);
    } else {
      checked.elsewhere[host].push_back(file);
    }
  }
  return checked;
}

bool read_newest_snapshot(const fs::path& folder, const std::function<void(SnapshotReader&)>& read, Memory memory) {
  auto found = snapshots_found_in(folder);
  while (!found.empty()) {
    for (auto it = found.rbegin(); it != found.rend(); ++it) {
      try {
        SnapshotReader reader(it->second, net::job_secret(), memory);
        read(reader);
        return true;
      } catch (const CheckpointError& error) {
        note_good(it->second, false);
        log(LogLevel::warning, "snapshot '" + it->second.string() + "' is passed over: " + error.what());
      }
    }
    // A job that goes on may have written others meanwhile, and removed these.
    auto later = snapshots_found_in(folder);
    if (later.empty() || later.rbegin()->first <= found.rbegin()->first) fail_without_good(folder);
    found = std::move(later);
  }
  return false;
}

std::vector<SnapshotInfo> list_snapshots(const fs::path& folder) {
  const auto found = snapshots_found_in(folder);
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

std::optional<StoredSnapshot> read_newest_snapshot(const fs::path& folder, Memory memory) {
  std::optional<StoredSnapshot> newest;
  const auto read = [&](SnapshotReader& reader) { newest = {reader.rest(), reader.folder()}; };
  read_newest_snapshot(folder, read, memory);
  return newest;
}

}  // namespace muster::checkpoint
