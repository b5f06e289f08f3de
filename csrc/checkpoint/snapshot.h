// Snapshots: named tensors and typed metadata in a folder. Either a snapshot is there whole or it is not there.
//
//   FOLDER/snapshot-0000000007/manifest.json
//   FOLDER/snapshot-0000000007/shard-00000.safetensors ...
//
// The manifest, {"crc32": "<8 hex digits>", "manifest": {...}}, holds the checksum (CRC-32) of its own inner object as
// it stands there, of every shard and of every tensor. Where the job has a secret, "hmac" stands before "manifest": 64
// hex digits, HMAC-SHA-256 of the inner object as it stands there, keyed with HMAC-SHA-256(secret, "muster snapshot
// manifest"); and each shard has its "sha256", 64 hex digits. Where ranks on several hosts wrote a snapshot together
// (joint_snapshot.h), a file that is on another host's disk has the "host", its name, and is there under this one's
// path, beside a manifest of the part, "<writer>.part.json"; it is read wherever the files are in one folder. Inside:
// "version" (kVersion); "strings", "int64s" and "doubles", the metadata by type (doubles as the shortest decimals that
// read back as the same value, in strings: JSON has no infinities); "shards", each with "file", "bytes" and "crc32";
// "tensors", each with "name", "dtype", "shape" and "pieces", one behind the other: "shard" (index), "name" (in that
// file, where it is another one), "begin" and "count" (elements, in row-major order) and "crc32". Numbers of snapshots
// grow: the highest is the newest.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"
#include "muster/error.h"
#include "net/job_secret.h"

namespace muster::checkpoint {

/// A value.
struct Snapshot {
  NamedTensors tensors;
  Metadata metadata;
};

/// One that was read.
struct StoredSnapshot : Snapshot {
  std::filesystem::path folder;  ///< its own
};

struct SnapshotOptions {
  std::optional<int> keep = {};              ///< how many of the newest good ones stay; empty: all
  uint64_t shard_bytes = uint64_t{1} << 30;  ///< tensors go to one file up to this; a larger one has its own
  /// Asked where a file or the snapshot's folder could not be written, which says why: true once it is to be tried
  /// again, false to give up.
  std::function<bool(const Error& error)> try_again = {};
  std::optional<net::JobSecret> secret = net::job_secret();  ///< signs it
  int64_t least = 1;                                         ///< of the numbers that it may have
  bool makes_folder = true;                                  ///< else a folder that is not there is an error
};

/// What `call` gives, which is called again after CheckpointError as often as options.try_again says.
template <class Call>
auto tried_again(const SnapshotOptions& options, const Call& call) {
  for (;;) {
    try {
      return call();
    } catch (const CheckpointError& error) {
      if (!options.try_again || !options.try_again(error)) throw;
    }
  }
}

/// Throws InvalidArgument for a number below 1.
void check_keep(const std::optional<int>& keep);

/// Writes a snapshot with the next number, then removes those that need not stay, and what dead writers left. Returns
/// its folder. A folder has one writer at a time. Blocks until all is on the disk. Throws InvalidArgument for tensors
/// that cannot be stored (check_storable) and text that is not UTF-8, CheckpointError where the system refuses; what
/// was there stays.
std::filesystem::path write_snapshot(const std::filesystem::path& folder, const Snapshot& snapshot,
                                     const SnapshotOptions& options);

/// The same of tensors that are never in memory together. `next` gives some at a time, of names that no others have,
/// and nothing after the last. What it gives at once lies in one file, which up to options.shard_bytes are gathered
/// for. What it throws ends the snapshot, which then is not there.
using NextTensors = std::function<NamedTensors()>;
std::filesystem::path write_snapshot(const std::filesystem::path& folder, const Metadata& metadata,
                                     const NextTensors& next, const SnapshotOptions& options);

/// A snapshot's tensors, file by file, in the order they were written. Owned by one thread.
class SnapshotReader {
 public:
  /// Reads the manifest in a snapshot's folder. Throws CheckpointError, naming the file, if it is damaged, of another
  /// version, or not signed with the secret, where there is one.
  explicit SnapshotReader(const std::filesystem::path& folder,
                          const std::optional<net::JobSecret>& secret = net::job_secret(), Memory memory = Memory::own);
  SnapshotReader(const SnapshotReader&) = delete;
  SnapshotReader& operator=(const SnapshotReader&) = delete;

  /// The same of a manifest that was parsed, of which some files may be in another folder.
  SnapshotReader(std::filesystem::path folder, Manifest manifest, Memory memory);

  const std::filesystem::path& folder() const noexcept { return folder_; }  ///< the snapshot's
  const Metadata& metadata() const noexcept { return manifest_.metadata; }
  const std::vector<Shard>& shards() const noexcept { return manifest_.shards; }
  uint64_t bytes() const noexcept;       ///< of all files
  uint64_t bytes_read() const noexcept;  ///< of those that were given

  /// The tensors of the next file, by their names there: what the manifest says of them, and its checksum, are right.
  /// Nothing after the last. Throws CheckpointError, naming the file and where it is known the tensor, if it is
  /// damaged: what came before is then not to be used either.
  std::optional<NamedTensors> next();
  /// All that next() would give, put together from their pieces.
  Snapshot rest();

  /// The tensors of one file, as next() gives them. Throws as next().
  NamedTensors read(size_t shard) const;
  /// Their names, in the order of NamedTensors.
  std::vector<std::string> names_in(size_t shard) const;
  /// What next() gives instead of reading that file: what read() gave elsewhere.
  void give(size_t shard, NamedTensors tensors) { given_.insert_or_assign(shard, std::move(tensors)); }

 private:
  struct Place {
    const TensorEntry* entry;
    const Piece* piece;
  };

  void note_pieces();
  void check(size_t shard, const NamedTensors& tensors, const TensorSums& sums) const;
  [[noreturn]] void fail(size_t shard, const std::string& what) const;

  std::filesystem::path folder_;
  Manifest manifest_;
  Memory memory_;
  std::vector<std::map<std::string, Place>> pieces_;  // by shard and name there
  std::map<size_t, NamedTensors> given_;              // by shard
  size_t next_ = 0;
};

/// One snapshot's folder. Throws CheckpointError, naming the file, if anything of it is damaged or of another version.
Snapshot read_snapshot(const std::filesystem::path& folder, Memory memory = Memory::own);

/// A snapshot of which the manifest alone was read.
struct SnapshotInfo {
  std::filesystem::path folder;
  Metadata metadata;
};
/// Those in a folder whose manifests are good, and signed where there is a job secret, by number, ascending; none where
/// there is no folder. The others are named in warnings; throws CheckpointError if that leaves none.
std::vector<SnapshotInfo> list_snapshots(const std::filesystem::path& folder);

/// A snapshot of which all files are good that are here.
struct CheckedSnapshot {
  Metadata metadata;
  std::map<std::string, std::vector<std::string>> elsewhere;  ///< files that are not, by the host that wrote them
};
/// Reads them. Throws as read_snapshot.
CheckedSnapshot check_snapshot(const std::filesystem::path& folder);

/// Whether a folder is what one host wrote of a snapshot whose manifest is on another host.
bool is_part_of_snapshot(const std::filesystem::path& folder);

/// Signs a snapshot, whoever wrote it and whether or not it is signed: the caller trusts what it holds. Throws
/// CheckpointError, naming the file, if anything of it is damaged, or the system refuses; it then is as it was. Throws
/// NotBuilt where this build cannot sign.
void sign_snapshot(const std::filesystem::path& snapshot, const net::JobSecret& secret);

/// Throws the CheckpointError of a folder in which no snapshot is good, as warnings have said of each.
[[noreturn]] void fail_without_good(const std::filesystem::path& folder);

/// Removes a snapshot at once: it is there whole or not at all. Throws CheckpointError where the system refuses.
void remove_snapshot(const std::filesystem::path& snapshot);

/// The newest good snapshot; nothing where there is none at all, or no folder. Each damaged one is named in a warning
/// and passed over; throws CheckpointError if that leaves none.
std::optional<StoredSnapshot> read_newest_snapshot(const std::filesystem::path& folder, Memory memory = Memory::own);

/// The same file by file: calls `read` with a reader of the newest snapshot, and where that throws CheckpointError, of
/// the one before, to begin anew. False: there is no snapshot at all.
bool read_newest_snapshot(const std::filesystem::path& folder, const std::function<void(SnapshotReader&)>& read,
                          Memory memory = Memory::own);

}  // namespace muster::checkpoint
