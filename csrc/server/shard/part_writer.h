// The thread's work that writes a server's part of a checkpoint, and what is known of it.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "checkpoint/awaited_part.h"
#include "server/protocol/protocol.h"
#include "server/shard/shard_part.h"

namespace muster::server {

/// Why this process cannot write to a draft: it does not see the folder, or the chief's lock there, or the folder is
/// another user's; empty where it can. Throws InvalidArgument unless `draft` is an absolute path that can be a draft's.
std::string reason_not_to_write(const std::string& draft);

/// Thread-safe. One part is written at a time.
class PartWriter {
 public:
  /// Held from find() until begin(): a request that came over a connection that was lost since may still be answered.
  std::mutex& asking() noexcept { return asking_; }
  /// The answer where the last part is of the draft with that id; else gives that part up, where it is not written yet,
  /// and waits for that.
  std::optional<WritesPart> find(uint64_t id);
  /// Has wait() hand a part out; `its_lock` is held until it is written. Throws CheckpointError where another one came
  /// first.
  void begin(std::unique_ptr<ShardPart> part, std::unique_ptr<checkpoint::PartLock> its_lock);

  /// Waits until there is one to write; false once stopped.
  bool wait();
  /// Writes it, and says in the draft where it cannot be. Never throws.
  void write() noexcept;
  /// What is being written is given up.
  void stop();

 private:
  using Lock = std::unique_lock<std::mutex>;

  void check() const;

  std::mutex asking_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  std::optional<uint64_t> id_;  // of the last part's draft
  WritesPart answer_;
  std::unique_ptr<ShardPart> part_;             // that waits for write()
  std::unique_ptr<checkpoint::PartLock> lock_;  // of the part
  bool is_writing_ = false;
  bool gives_up_ = false;
  bool stops_ = false;
};

}  // namespace muster::server
