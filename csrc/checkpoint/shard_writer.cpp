#include "checkpoint/shard_writer.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "checkpoint/snapshot_names.h"
#include "muster/error.h"

namespace muster::checkpoint {

namespace {

namespace fs = std::filesystem;

// What `write` gives, which may write the file more than once.
template <class Write>
auto written(const fs::path& path, const SnapshotOptions& options, const Write& write) {
  bool is_first = true;
  return tried_again(options, [&] {
    std::error_code ignored;  // what an earlier try left does not hinder it, or does again
    if (!std::exchange(is_first, false)) fs::remove(path, ignored);
    return write();
  });
}

std::string name_in_file(const Run& run) {
  if (run.is_whole()) return run.name;
  return run.name + "[" + std::to_string(run.begin) + ":" + std::to_string(run.begin + run.elements.numel()) + "]";
}

}  // namespace

ShardWriter::ShardWriter(fs::path folder, std::string prefix, const SnapshotOptions& options)
    : folder_(std::move(folder)), prefix_(std::move(prefix)), options_(options) {}

void ShardWriter::add(std::vector<Run> runs) {
  std::erase_if(runs, [](const Run& run) { return run.elements.numel() == 0 && !run.is_whole(); });
  uint64_t more = 0;
  for (const auto& run : runs) {
    check_storable(run.name, run.elements);
    more += run.elements.nbytes();
  }
  if (bytes_ + more > options_.shard_bytes) flush();
  for (auto& run : runs) {
    if (run.is_whole()) run.elements = run.elements.reshape(run.shape);
    const auto name = run.name;
    if (!runs_.emplace(name_in_file(run), std::move(run)).second) {
      throw InvalidArgument("a snapshot was given two tensors '" + name + "'");
    }
  }
  bytes_ += more;
}

void ShardWriter::flush() {
  if (runs_.empty()) return;
  NamedTensors tensors;
  for (const auto& [name, run] : runs_) tensors.emplace(name, run.elements);
  const auto path = folder_ / (prefix_ + padded(static_cast<int64_t>(shards_.size()), 5) + ".safetensors");
  const auto sums =
      written(path, options_, [&] { return write_safetensors(path, tensors, options_.secret.has_value()); });
  for (const auto& [name, run] : runs_) {
    const auto dtype = dtype_name(run.elements.scalar_type());
    auto& entry = tensors_.try_emplace(run.name, TensorEntry{run.name, dtype, run.shape, {}}).first->second;
    if (entry.dtype != dtype || entry.shape != run.shape) {
      throw InvalidArgument("a snapshot was given runs of '" + run.name + "' with other dtypes or shapes");
    }
    for (const auto& piece : entry.pieces) {
      if (run.begin < piece.begin + piece.count && piece.begin < run.begin + run.elements.numel()) {
        throw InvalidArgument("a snapshot was given elements of '" + run.name + "' twice");
      }
    }
    entry.pieces.push_back({shards_.size(), name, run.begin, run.elements.numel(), sums.crc32s.at(name)});
  }
  shards_.push_back({path.filename(), sums.file});
  runs_.clear();
  bytes_ = 0;
}

Manifest ShardWriter::finish() {
  flush();
  Manifest manifest{{}, std::move(shards_), {}};
  for (auto& [name, entry] : tensors_) {
    std::ranges::sort(entry.pieces, {}, &Piece::begin);
    manifest.tensors.push_back(std::move(entry));
  }
  return manifest;
}

void write_manifest(const fs::path& path, const Manifest& manifest, const SnapshotOptions& options, Pieces pieces) {
  const auto text = manifest_of(manifest, options.secret, pieces);
  written(path, options, [&] {
    FileWriter file(path);
    file.write(text.data(), text.size());
    file.finish();
    flush_folder(path.parent_path());
    return true;
  });
}

}  // namespace muster::checkpoint
