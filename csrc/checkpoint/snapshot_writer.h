// Snapshots written while training goes on.
#pragma once

#include <sys/types.h>

#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "checkpoint/folder_claim.h"
#include "checkpoint/shard_writer.h"
#include "checkpoint/snapshot.h"

namespace muster::checkpoint {

/// Writes one snapshot after another, each on a thread of its own; errors reach the caller at the next wait() or
/// write(). Externally synchronised, but for what says otherwise.
class SnapshotWriter {
 public:
  /// See write_snapshot; the folder need not exist. The first snapshot claims it, until this object goes.
  SnapshotWriter(std::filesystem::path folder, SnapshotOptions options);
  /// Waits for the last snapshot; an error that nobody took is logged.
  ~SnapshotWriter();
  SnapshotWriter(const SnapshotWriter&) = delete;
  SnapshotWriter& operator=(const SnapshotWriter&) = delete;

  const std::filesystem::path& folder() const noexcept { return folder_; }
  const SnapshotOptions& options() const noexcept { return options_; }

  /// Begins a snapshot of tensors that are handed over: until done() nobody may write them. Waits for the one before,
  /// and throws what went wrong with that; then `snapshot` is not written. Tensors that cannot be stored are an
  /// InvalidArgument here, a folder that cannot be claimed, a thread that cannot be made, or a fork, a CheckpointError.
  void write(Snapshot snapshot);

  /// The same of copies, made before it returns, in memory that is used again by the next copy.
  void write_copy(const Snapshot& snapshot);

  /// What write() does first: waits for the snapshot before and throws what went wrong with that, and claims the
  /// folder. Throws CheckpointError where it cannot be, or somebody else has claimed it since.
  void claim();
  /// Whether the folder was claimed here.
  bool has_claim() const noexcept { return claim_ != nullptr; }

  /// The next snapshot of write() has at least this number.
  void number_from(int64_t least) noexcept { least_ = least; }

  /// Copies of runs in the memory of write_copy's, on the CPU wherever the runs are, which come once each by name.
  /// Nothing may be being written.
  std::vector<Run> copied(const std::vector<Run>& runs);

  /// Begins, where nothing is being written, a call of `write` on the thread: what it returns is written(), where it is
  /// not empty, and what it throws is thrown as by write(). Throws CheckpointError where no thread can be made.
  void begin(std::function<std::filesystem::path()> write);

  /// The next wait() or write() throws this, as if it had gone wrong with what was begun.
  void note_failure(std::exception_ptr error) noexcept;

  /// Whether everything that was begun is on the disk, or failed; true in a fork, where nobody writes. Does not block.
  /// Thread-safe.
  bool done() const;

  /// The folder of the last snapshot that is on the disk; empty before the first. Thread-safe.
  std::filesystem::path written() const;

  /// Waits for what was begun, and throws what went wrong with it, once; no-op in a fork.
  void wait();

 private:
  void wait_and_claim();
  void begin(Snapshot snapshot);
  void run(const std::function<std::filesystem::path()>& write) noexcept;

  const std::filesystem::path folder_;
  const SnapshotOptions options_;
  const pid_t made_by_;
  std::unique_ptr<FolderClaim> claim_;
  int64_t least_ = 1;
  NamedTensors copies_;  // by the runs' names
  std::thread thread_;
  mutable std::mutex mutex_;
  bool running_ = false;           // guarded by mutex_
  std::filesystem::path written_;  // guarded by mutex_
  std::exception_ptr error_;       // guarded by mutex_
};

}  // namespace muster::checkpoint
