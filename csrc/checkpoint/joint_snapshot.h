// A snapshot that the ranks of a job write together, each a part of its own (draft.h), which the chief, rank 0, makes
// whole. Those that see its folder write there. Others have a folder on their own host, which ranks of that host share,
// and write only what the chief's host does not have:
//
//   the chief's host:  FOLDER/snapshot-0000000007/manifest.json worker-0-... worker-1-...
//   another one:       FOLDER/snapshot-0000000007/worker-2-....part.json worker-2-... worker-3-...
//
// The files of the second are listed in the manifest, with their host: copied into one folder, they are a snapshot as
// any other. They are on the disk, under these names, before the chief makes its own folder the snapshot. A part that
// is older than what the chief keeps goes once that has a newer one, where it is of the same lineage: that of a job,
// and of all that went on from what it saved.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/awaited_part.h"
#include "checkpoint/draft.h"
#include "checkpoint/part_task.h"
#include "checkpoint/snapshot_writer.h"

namespace muster::checkpoint {

/// What a rank has of a snapshot. Tensors may be on any device. A value.
struct JointContent {
  NamedTensors chiefs = {};       ///< looked at on the chief, which writes them
  NamedTensors alike = {};        ///< equal on all ranks, of which each writes a share
  std::vector<Run> divided = {};  ///< of tensors whose other elements other ranks have; empty runs name tensors alone
};

/// The runs that `rank` of `ranks` writes of tensors that all have: shares of the bytes in the order of names, equal
/// but for what the chief has to write besides (`chiefs_bytes`), whose share is smaller by that. Tensors below 256 KiB
/// and those that are not contiguous stay whole. Ranks that are given the same tensors need not talk.
std::vector<Run> share_of(const NamedTensors& alike, int rank, int ranks, uint64_t chiefs_bytes);

/// One snapshot, on one rank. Its calls are local; in between every rank is told what each call gave on all of them,
/// by rank: announce, look, copy, and once all ranks have copied, start. Owned by one thread.
///
/// Ranks on other hosts than the chief's tell it through a client of `store` when they have written; without one they
/// write nothing, and there is no joint snapshot of tensors that are divided.
class JointSnapshot {
 public:
  /// `writer`, which outlives this, has the folder as this rank sees it.
  JointSnapshot(SnapshotWriter& writer, int rank, net::StorePtr store = {});
  /// As close().
  ~JointSnapshot();
  JointSnapshot(const JointSnapshot&) = delete;
  JointSnapshot& operator=(const JointSnapshot&) = delete;

  /// Waits for the snapshot before, and throws what went wrong with it. On the chief claims the folder, and begins the
  /// snapshot, of which the text says how others find it, and its `lineage`, a word, which others' is not looked at.
  /// Others' text says how far the numbers in their folder go. Throws CheckpointError.
  std::string announce(const std::string& lineage = {});

  /// Whether this rank sees what the chief has begun, and what it will write, in words for copy(). Where it does not,
  /// and has elements of its own, it begins the same in its own folder, where that is there; not where another process
  /// uses that, or it is the chief's, of which this rank's file system shows what was: the log says so once. Throws
  /// InvalidArgument for tensors that cannot be stored.
  std::string look(const std::vector<std::string>& announced, JointContent content);

  /// Copies what this rank writes into the writer's memory. False, and nothing is begun any more, where a rank may not
  /// write where it is to, or has other tensors than the chief in `alike`, by names, layouts or any of the values: then
  /// the chief is to write all of it, with a number above those of all ranks. Equal on all ranks. On another host its
  /// first rank claims the folder. The log of the chief names, once for a folder, the hosts that have parts. Throws
  /// CheckpointError.
  bool copy(const std::vector<std::string>& looked);

  /// Writes on the writer's thread, on the chief until the snapshot is there with `metadata`, which others' is not
  /// looked at. A rank that could not write is named in what the chief's writer throws, and so is one that died, or
  /// from which nothing came for `patience`. A thread that cannot be made is such a failure, too.
  void start(const Metadata& metadata, std::chrono::milliseconds patience);

  /// Removes what was begun, unless start() has been called. Idempotent.
  void close() noexcept;

 private:
  /// Where a rank's part is: with the chief's, in a folder of its own host, or nowhere, as it has none.
  enum class Place { home, away, nowhere };
  /// What the chief has told, with what is known of all hosts.
  struct Announced {
    std::string draft;   ///< the name that the chief's folder of it has until all have looked
    std::string agreed;  ///< and the one that it has on all hosts then: its number is above all that are in use
    int64_t number = 1;
    int64_t oldest = 0;  ///< the number of the oldest snapshot that `keep` leaves; 0: all stay
    std::string lineage;
  };
  /// A rank's words of look().
  struct Looked {
    explicit Looked(const std::string& text);
    std::string digest;  ///< of what all ranks should have alike; empty where it may not write
    bool has_lock = false;
    uint64_t chiefs_bytes = 0;
    Place place = Place::home;
    bool has_made = false;   ///< the draft, on another host
    bool has_claim = false;  ///< of its folder
    std::string claim;       ///< the mark of that; "-" where nobody has it
    std::string host;

    bool leads() const;  ///< the ranks of another host
  };

  bool is_chief() const noexcept { return rank_ == 0; }
  std::string name() const;  // of this rank as a writer of the draft
  void read_announced(const std::vector<std::string>& announced);
  bool can_write();
  bool begin_away();
  bool is_chiefs_folder() const;
  bool is_claimed_by_others(const std::vector<Looked>& looked) const;
  void lead(const std::vector<Looked>& looked);
  void lead_host(const std::vector<Looked>& looked);
  void note_others(const std::vector<Looked>& looked, const std::function<bool(size_t)>& is_noted);
  void warn_of_hosts(const std::vector<Looked>& looked) const;

  SnapshotWriter& writer_;
  const int rank_;
  const net::StorePtr store_;
  const pid_t made_by_;
  JointContent content_;
  std::vector<Run> runs_;  // copies
  std::filesystem::path draft_;
  bool is_draft_own_ = false;  // so that it is to be removed here
  std::string token_;          // of this snapshot
  Announced announced_;
  Place place_ = Place::home;
  bool has_made_ = false;
  std::vector<AwaitedPart> others_;     // for whom the owner of the draft waits
  std::vector<std::string> elsewhere_;  // who write on other hosts, for whom the chief waits
  std::vector<std::string> leaders_;    // and those who tell of them
  net::StorePtr words_;                 // the store, as the writer's thread uses it
  std::shared_ptr<const PartLock> lock_;
  bool is_started_ = false;
};

}  // namespace muster::checkpoint
