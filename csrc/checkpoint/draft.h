// A snapshot that several processes write, servers and workers say: a folder that is no snapshot yet, in which each
// writes files of its own and last a manifest of them, and one of them makes it the snapshot once all have.
//
//   FOLDER/.partial-snapshot-0000000007-1234567/worker-1-00000.safetensors ...
//   FOLDER/.partial-snapshot-0000000007-1234567/worker-1.part.json
//
// The last number is random: what was begun before and given up is another draft. A part's manifest is as a snapshot's
// (snapshot.h), but its pieces need not be all of a tensor, it is signed as a part, and its metadata has the folder's
// name ("draft") and the writer's ("writer").
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "checkpoint/shard_writer.h"
#include "checkpoint/snapshot.h"
#include "checkpoint/snapshot_folder.h"

namespace muster::checkpoint {

/// What the name of a draft's folder begins with.
inline constexpr std::string_view kDraftPrefix = ".partial-snapshot-";

/// Begins a draft in a folder that this process has claimed (FolderClaim), and removes what dead writers left. Returns
/// the draft's path, for all writers. Throws CheckpointError where the system refuses.
std::filesystem::path begin_draft(const std::filesystem::path& folder);

/// Gives some runs at a time, which lie in one file, and nothing after the last.
using NextRuns = std::function<std::vector<Run>()>;

/// Writes what one writer has: letters, digits and hyphens name it, and no other one of the draft. Blocks until all is
/// on the disk; then the part is there. Throws InvalidArgument as write_snapshot and for such a name, CheckpointError
/// where the system refuses, or the draft is gone. `labels`: of its metadata, those that are other ones, or are added.
void write_part(const std::filesystem::path& draft, const std::string& writer, const NextRuns& next,
                const SnapshotOptions& options, const Metadata& labels = {});

/// Calls `act` with each file of a draft whose name begins with the writer's and a hyphen.
template <class Act>
void for_files_of(const std::filesystem::path& draft, const std::string& writer, const Act& act) {
  std::error_code error;
  for (auto entry = std::filesystem::directory_iterator(draft, error);
       !error && entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    if (entry->path().filename().string().starts_with(writer + "-")) act(entry->path());
  }
}

/// The bytes that they have so far.
uint64_t written_by(const std::filesystem::path& draft, const std::string& writer);

/// Says instead why there will be no part of this writer, whose files it removes: a disk that is full has room then.
/// Never throws: where the disk refuses all the same, nobody is told,
/// as where the draft is gone.
void fail_part(const std::filesystem::path& draft, const std::string& writer, const std::string& reason) noexcept;

/// Whether a writer's part is there. Throws CheckpointError naming the writer, with its reason, where it has failed,
/// and where the draft is gone.
bool has_part(const std::filesystem::path& draft, const std::string& writer);

/// Makes the draft, of which all parts are there, the newest snapshot of its folder; then removes those that need not
/// stay. Returns its folder. Throws CheckpointError for a part that is damaged or missing, naming it, for tensors that
/// have other dtypes or shapes in two parts, and where parts overlap or leave a gap, naming the tensor; then there is
/// no such snapshot. Whatever else is in the draft goes. `names`: tensors of parts that have other names in the
/// snapshot; one of them that is in no part is a CheckpointError too. `hosts`: by writer, that on whose disk the files
/// of its part are (take_part); others are in the draft.
std::filesystem::path finish_draft(const std::filesystem::path& draft, const std::vector<std::string>& writers,
                                   const Metadata& metadata, const SnapshotOptions& options,
                                   const std::map<std::string, std::string>& names = {},
                                   const std::map<std::string, std::string>& hosts = {});

/// The manifest of a part that is there. Throws CheckpointError.
std::string part_text(const std::filesystem::path& draft, const std::string& writer);
/// Makes a part be there whose files are elsewhere, by its part_text. Throws CheckpointError where the system refuses.
void take_part(const std::filesystem::path& draft, const std::string& writer, const std::string& text);

/// Gives parts, which are there, the place that their files have in the snapshot where the draft becomes one on another
/// host: a folder of its name, with the parts' manifests in the place of the whole's. All is on the disk when it
/// returns that folder. Throws CheckpointError where the system refuses.
std::filesystem::path place_parts(const std::filesystem::path& draft, const std::vector<std::string>& writers);

/// Removes what place_parts has made in a folder of numbers below `first`, where all parts have the label "lineage"
/// with this value; none for an empty one. Snapshots, and parts of other lineages, stay. What cannot be read, or
/// removed, is named in warnings.
void remove_placed_parts(const std::filesystem::path& folder, int64_t first, const std::string& lineage,
                         const std::optional<net::JobSecret>& secret) noexcept;

}  // namespace muster::checkpoint
