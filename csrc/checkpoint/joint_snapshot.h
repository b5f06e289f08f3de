// A snapshot that the ranks of a job write together, into a folder that all of them see: each a part of its own
// (draft.h), which the chief, rank 0, makes whole.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/awaited_part.h"
#include "checkpoint/draft.h"
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
class JointSnapshot {
 public:
  /// `writer`, which outlives this, has the folder as this rank sees it.
  JointSnapshot(SnapshotWriter& writer, int rank, int ranks);
  /// As close().
  ~JointSnapshot();
  JointSnapshot(const JointSnapshot&) = delete;
  JointSnapshot& operator=(const JointSnapshot&) = delete;

  /// Waits for the snapshot before, and throws what went wrong with it. On the chief claims the folder, and begins the
  /// snapshot, of which the text says how others find it. Throws CheckpointError.
  std::string announce();

  /// Whether this rank sees what the chief has begun, and what it will write, in words for copy(). Throws
  /// InvalidArgument for tensors that cannot be stored.
  std::string look(const std::vector<std::string>& announced, JointContent content);

  /// Copies what this rank writes into the writer's memory. False, and nothing is begun any more, where a rank does not
  /// see it or may not write there, or has other tensors than the chief in `alike`, by names, layouts or any of the
  /// values: then the chief is to write all of it. Equal on all ranks.
  bool copy(const std::vector<std::string>& looked);

  /// Writes on the writer's thread, on the chief until the snapshot is there with `metadata`, which others' is not
  /// looked at. A rank that could not write is named in what the chief's writer throws, and so is one that died, or
  /// from which nothing came for `patience`.
  void start(const Metadata& metadata, std::chrono::milliseconds patience);

  /// Removes what was begun, unless start() has been called. Idempotent.
  void close() noexcept;

 private:
  bool is_chief() const noexcept { return rank_ == 0; }
  std::string name() const;  // of this rank as a writer of the draft

  SnapshotWriter& writer_;
  const int rank_;
  const int ranks_;
  const pid_t made_by_;
  JointContent content_;
  std::vector<Run> runs_;  // copies
  std::filesystem::path draft_;
  std::string token_;           // of this snapshot
  std::vector<bool> has_lock_;  // by rank: whether the chief sees the lock that it holds for as long as it lives
  std::shared_ptr<const PartLock> lock_;
  bool is_started_ = false;
};

}  // namespace muster::checkpoint
