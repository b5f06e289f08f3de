// The snapshots of a server: which there are, and up to which step they hold whose pushes.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/snapshot.h"
#include "server/protocol/protocol.h"
#include "server/shard/image.h"
#include "server/shard/snapshot_store.h"

namespace muster::server {

/// Thread-safe; writes one at a time. Two stay, and those of steps that other servers may have to go back to.
class ServerSnapshots {
 public:
  /// Null: none are kept.
  explicit ServerSnapshots(std::unique_ptr<SnapshotStore> store);

  bool are_kept() const noexcept { return store_ != nullptr; }
  /// Of the store; see SnapshotStore. Only where snapshots are kept.
  uint64_t life() const { return store_->life(); }

  /// Steps of synchronous snapshots that can be read, ascending.
  std::vector<uint64_t> steps() const;

  /// Gives a snapshot's tensors to whom it is given, some at a time.
  using Source = std::function<void(const std::function<void(const checkpoint::NamedTensors&)>& take)>;
  using Restore = std::function<void(const Source& source)>;
  /// Has `restore` take up the newest snapshot. Where that throws CheckpointError or CommError, as it does for one that
  /// is damaged, it is named in a warning, and `restore` begins anew with the one before. False where there is none at
  /// all; throws CheckpointError where none is good.
  bool read_newest(const Restore& restore);
  /// The same of that of a step, the only one that will do.
  void read(uint64_t step, const Restore& restore);
  /// Removes those of later steps, which did not happen, damaged ones too.
  void remove_after(uint64_t step);
  /// What there is belongs to a job that is over: none counts as kept any more, and the next one that is written takes
  /// the place of all of them, also for who opens the store then. Until then they are what a restart finds.
  void begin_anew();
  /// Bytes that are read, and of how many, while one is.
  std::pair<uint64_t, uint64_t> progress() const;

  struct Content {
    std::vector<Image::Facts> images;  ///< of all chunks and tables
    checkpoint::NextTensors next;
    uint64_t file_bytes = 0;  ///< see checkpoint::SnapshotOptions::shard_bytes
    uint64_t origin = 0;      ///< see Configured; for who puts several servers' together without them
  };
  /// Writes one of `step`, 0 where steps are not made together, and removes those that nobody needs any more: `keep` as
  /// in Cut. Where it cannot be written that is tried again as long as `pause`, which waits longer each time, returns
  /// true. Throws CheckpointError.
  using Pause = std::function<bool(uint32_t failures)>;
  void write(const Content& content, uint64_t step, uint64_t keep, const Pause& pause);

  /// Of a synchronous job, by the step; of another, by a worker's incarnation.
  Durable durable() const;
  Durable durable(uint32_t rank, uint64_t incarnation) const;

  /// Why the last ones could not be written, and how many those are.
  struct Trouble {
    std::string text;
    uint32_t failures = 0;
  };
  Trouble trouble() const;
  /// A snapshot of `step` is not written, for this reason, and will not be tried again: an error for who waits for it,
  /// unless a later one is there.
  void give_up(uint64_t step, const std::string& why);
  /// A job goes on from a step that is kept: what could not be written before is none of its business.
  void forget_trouble();

 private:
  using Marks = std::map<uint32_t, std::pair<uint64_t, uint64_t>>;  // by rank: incarnation and step
  struct Kept {
    std::string name;
    uint64_t step = 0;
    Marks marks;
  };

  void read_one(const Kept& kept, const Restore& restore);
  /// In the job that was the `job`-th to begin anew when its writing began.
  void note_written(Kept written, uint64_t job);
  /// False, and a warning, where it stays.
  bool remove(const std::string& name);
  void remove_surplus(uint64_t keep);

  const std::unique_ptr<SnapshotStore> store_;
  std::mutex store_mutex_;
  mutable std::mutex mutex_;
  // Guarded by mutex_:
  std::vector<Kept> kept_;           // ascending
  std::vector<std::string> former_;  // names of those that the next one takes the place of
  uint64_t jobs_ = 0;                // that began anew
  Trouble trouble_;
  std::pair<uint64_t, uint64_t> progress_;
};

}  // namespace muster::server
