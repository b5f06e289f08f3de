#include "checkpoint/draft.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "checkpoint/snapshot_names.h"
#include "core/log.h"
#include "muster/error.h"

namespace muster::checkpoint {

namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMaxReason = uint64_t{1} << 16;  // bytes

fs::path part_manifest(const fs::path& draft, const std::string& writer) { return draft / (writer + kPartSuffix); }
fs::path reason_file(const fs::path& draft, const std::string& writer) { return draft / (writer + ".failed"); }

Metadata labels_of(const fs::path& draft, const std::string& writer) {
  return {{"draft", draft.filename().string()}, {"writer", writer}};
}

void check_writer(const std::string& writer) {
  static constexpr std::string_view kUsual = "-0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  const auto is_usual = [](char c) { return kUsual.find(c) != std::string_view::npos; };
  if (!writer.empty() && std::ranges::all_of(writer, is_usual) && writer.front() != '-') return;
  throw InvalidArgument("'" + writer + "' is no name of a writer: letters, digits and hyphens, with no hyphen first");
}

void check_there(const fs::path& draft) {
  if (fs::is_directory(draft)) return;
  throw CheckpointError("the folder '" + draft.string() +
                        "' of a snapshot that was being written is gone: who began it gave it up, as its log says, " +
                        "another process writes to '" + draft.parent_path().string() + "', or somebody removed it");
}

// Tensors of all parts by name; the pieces' shards are the whole's.
class MergedTensors {
 public:
  void add(const std::string& writer, TensorEntry entry, size_t first_shard) {
    for (auto& piece : entry.pieces) piece.shard += first_shard;
    auto [found, is_new] = tensors_.try_emplace(entry.name, entry);
    if (is_new) return;
    auto& known = found->second;
    if (known.dtype != entry.dtype || known.shape != entry.shape) {
      throw CheckpointError("tensor '" + entry.name + "' has another dtype or shape in the part of " + writer +
                            " than in those before");
    }
    std::ranges::move(entry.pieces, std::back_inserter(known.pieces));
  }

  // Each of `names` by its second one.
  std::vector<TensorEntry> whole(const std::map<std::string, std::string>& names) {
    for (const auto& [name, other] : names) {
      auto found = tensors_.extract(name);
      if (found.empty()) throw CheckpointError("no part has tensor '" + name + "', which is '" + other + "'");
      found.key() = found.mapped().name = other;
      if (!tensors_.insert(std::move(found)).inserted) {
        throw CheckpointError("parts have two tensors '" + other + "'");
      }
    }
    std::vector<TensorEntry> entries;
    for (auto& [name, entry] : tensors_) {
      std::ranges::sort(entry.pieces, {}, &Piece::begin);
      if (const auto gap = first_gap(entry)) {
        throw CheckpointError("the parts of tensor '" + name + "' " + (gap->second ? "overlap" : "leave a gap") +
                              " at element " + std::to_string(gap->first));
      }
      entries.push_back(std::move(entry));
    }
    return entries;
  }

 private:
  // The element where pieces leave a gap, or overlap (true).
  static std::optional<std::pair<int64_t, bool>> first_gap(const TensorEntry& entry) {
    int64_t next = 0;
    for (const auto& piece : entry.pieces) {
      if (piece.begin != next) return std::pair(std::min(piece.begin, next), piece.begin < next);
      next += piece.count;
    }
    const auto all = c10::multiply_integers(entry.shape);
    if (next != all) return std::pair(next, next > all);
    return std::nullopt;
  }

  std::map<std::string, TensorEntry> tensors_;
};

Manifest merged(const fs::path& draft, const std::vector<std::string>& writers,
                const std::map<std::string, std::string>& names, const std::map<std::string, std::string>& hosts,
                const std::optional<net::JobSecret>& secret) {
  Manifest whole;
  MergedTensors tensors;
  for (const auto& writer : writers) {
    auto part = read_manifest(part_manifest(draft, writer), secret, Pieces::some);
    const auto has = [&](const auto& label) {
      const auto found = part.metadata.find(label.first);
      return found != part.metadata.end() && found->second == label.second;
    };
    if (!std::ranges::all_of(labels_of(draft, writer), has)) {
      throw CheckpointError("'" + part_manifest(draft, writer).string() +
                            "' is the part of another snapshot or writer");
    }
    const auto host = hosts.find(writer);
    for (auto& shard : part.shards) shard.host = host == hosts.end() ? "" : host->second;
    const size_t first_shard = whole.shards.size();
    std::ranges::move(part.shards, std::back_inserter(whole.shards));
    for (auto& entry : part.tensors) tensors.add(writer, std::move(entry), first_shard);
  }
  whole.tensors = tensors.whole(names);
  return whole;
}

bool is_manifest_of_part(const fs::path& file) { return file.filename().string().ends_with(kPartSuffix); }

// Whether a folder has nothing but parts of a lineage.
bool has_parts_of(const fs::path& folder, const std::string& lineage, const std::optional<net::JobSecret>& secret) {
  if (fs::exists(folder / kManifest)) return false;
  size_t parts = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    if (!is_manifest_of_part(entry.path())) continue;
    const auto labels = read_manifest(entry.path(), secret, Pieces::some).metadata;
    const auto found = labels.find(kLineageLabel);
    if (found == labels.end() || found->second != Metadata::mapped_type(lineage)) return false;
    ++parts;
  }
  return parts > 0;
}

void remove_others(const fs::path& draft, const std::set<std::string>& known) {
  std::vector<fs::path> others;
  for (const auto& entry : fs::directory_iterator(draft)) {
    if (!known.contains(entry.path().filename().string())) others.push_back(entry.path());
  }
  for (const auto& other : others) fs::remove_all(other);
}

}  // namespace

fs::path begin_draft(const fs::path& folder) {
  return in_folder(folder, [&] { return begin_snapshot(folder); });
}

uint64_t written_by(const fs::path& draft, const std::string& writer) {
  uint64_t bytes = 0;
  for_files_of(draft, writer, [&](const fs::path& file) {
    std::error_code gone;
    const auto size = fs::file_size(file, gone);
    if (!gone) bytes += size;
  });
  return bytes;
}

void write_part(const fs::path& draft, const std::string& writer, const NextRuns& next, const SnapshotOptions& options,
                const Metadata& labels) {
  check_writer(writer);
  in_folder(draft, [&] {
    check_there(draft);
    ShardWriter shards(draft, writer + "-", options);
    for (auto runs = next(); !runs.empty(); runs = next()) shards.add(runs);
    auto part = shards.finish();
    part.metadata = labels_of(draft, writer);
    for (const auto& [label, value] : labels) part.metadata.insert_or_assign(label, value);
    const auto unfinished = draft / ('.' + writer + kPartSuffix);
    write_manifest(unfinished, part, options, Pieces::some);
    fs::rename(unfinished, part_manifest(draft, writer));
    flush_folder(draft);
    return true;
  });
}

void fail_part(const fs::path& draft, const std::string& writer, const std::string& reason) noexcept {
  std::error_code error;
  if (!fs::exists(draft, error)) return;                        // nobody waits
  if (fs::exists(part_manifest(draft, writer), error)) return;  // it is there: others may have seen that
  try {
    for_files_of(draft, writer, [](const fs::path& file) {
      std::error_code ignored;
      fs::remove(file, ignored);
    });
    const auto unfinished = draft / ("." + writer + ".failed");
    FileWriter file(unfinished);
    file.write(reason.data(), std::min<size_t>(reason.size(), kMaxReason));
    file.finish();
    fs::rename(unfinished, reason_file(draft, writer));
  } catch (const std::exception& error) {
    log(LogLevel::warning, "others that write to '" + draft.string() + "' wait in vain for " + writer +
                               ", which cannot tell them so: " + error.what());
  }
}

bool has_part(const fs::path& draft, const std::string& writer) {
  return in_folder(draft, [&] {
    if (fs::exists(part_manifest(draft, writer))) return true;
    if (fs::exists(reason_file(draft, writer))) {
      FileReader file(reason_file(draft, writer));
      throw CheckpointError(writer + " could not write its part: " + file.read_text(std::min(file.size(), kMaxReason)));
    }
    check_there(draft);
    return false;
  });
}

fs::path finish_draft(const fs::path& draft, const std::vector<std::string>& writers, const Metadata& metadata,
                      const SnapshotOptions& options, const std::map<std::string, std::string>& names,
                      const std::map<std::string, std::string>& hosts) {
  check_keep(options.keep);
  return in_folder(draft, [&] {
    auto whole = merged(draft, writers, names, hosts, options.secret);
    whole.metadata = metadata;
    std::set<std::string> known;
    for (const auto& shard : whole.shards) known.insert(shard.file);
    remove_others(draft, known);
    write_manifest(draft / kManifest, whole, options);
    return end_snapshot(draft, options.keep, options.secret);
  });
}

std::string part_text(const fs::path& draft, const std::string& writer) {
  return manifest_text(part_manifest(draft, writer));
}

void take_part(const fs::path& draft, const std::string& writer, const std::string& text) {
  in_folder(draft, [&] {
    FileWriter file(part_manifest(draft, writer));
    file.write(text.data(), text.size());
    file.finish();
    return true;
  });
}

fs::path place_parts(const fs::path& draft, const std::vector<std::string>& writers) {
  return in_folder(draft, [&] {
    std::set<std::string> known;
    for (const auto& writer : writers) {
      known.insert(part_manifest(draft, writer).filename());
      for_files_of(draft, writer, [&](const fs::path& file) { known.insert(file.filename()); });
    }
    remove_others(draft, known);
    flush_folder(draft);
    auto placed = end_snapshot(draft, {}, {});
    note_good(placed, false);  // it is no snapshot
    return placed;
  });
}

void remove_placed_parts(const fs::path& folder, int64_t first, const std::string& lineage,
                         const std::optional<net::JobSecret>& secret) noexcept {
  if (lineage.empty()) return;
  try {
    for (const auto& [number, path] : snapshots_in(folder)) {
      if (number >= first) return;
      try {
        if (has_parts_of(path, lineage, secret)) remove_snapshot(path);
      } catch (const std::exception& error) {
        log(LogLevel::warning, "'" + path.string() + "' stays, which is older than what is kept: " + error.what());
      }
    }
  } catch (const std::exception& error) {
    log(LogLevel::warning, "old parts in '" + folder.string() + "' stay: " + error.what());
  }
}

}  // namespace muster::checkpoint
