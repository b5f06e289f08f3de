// The wait for parts of a draft (draft.h) that others write: who waits sees whether a writer still lives by its lock.
#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <system_error>
#include <vector>

#include "checkpoint/draft.h"
#include "checkpoint/unforked_file.h"

namespace muster::checkpoint {

/// A lock (flock(2)) on a file of the draft, held by a writer until it has written its part, or has said why it will
/// not. The system drops it with the process.
class PartLock {
 public:
  /// Makes the writer's file, and locks it.
  PartLock(const std::filesystem::path& draft, const std::string& writer);

  /// Whether the file could be made.
  bool has_file() const noexcept { return has_file_; }
  /// Why it is not held.
  const std::error_code& error() const noexcept { return error_; }
  /// Whether others see that this process lives; not on file systems without locks.
  bool is_held() const noexcept { return has_file_ && is_held_; }

 private:
  UnforkedFile file_;
  bool has_file_ = false;
  bool is_held_ = false;
  std::error_code error_;
};

/// Whether a writer has a file of PartLock, and nobody holds the lock.
bool is_unlocked(const std::filesystem::path& draft, const std::string& writer) noexcept;
/// Whether it has one, and somebody does.
bool is_locked(const std::filesystem::path& draft, const std::string& writer);

/// Whether it has one.
bool has_lock_file(const std::filesystem::path& draft, const std::string& writer);

/// Whether a file of a draft is there, also for a client of a file server that remembers that it was not.
bool sees(const std::filesystem::path& draft, const std::filesystem::path& file);

/// A writer whose part is waited for.
struct AwaitedPart {
  std::string writer;
  bool has_lock = false;  ///< PartLock::is_held() there, and seen here
  /// Of what is not written into the draft: as has_part(), and the bytes that are written of it.
  std::function<bool()> is_there = {};
  std::function<uint64_t()> progress = {};
};

/// Waits until every one of them has written its part or will not: because it says so, has died, or nothing came of any
/// of them for `patience`. Returns the first CheckpointError, or null.
std::exception_ptr await_parts(const std::filesystem::path& draft, std::vector<AwaitedPart> awaited,
                               std::chrono::milliseconds patience);

/// What who waits does: writes the part of `writer`, waits by `await_others`, which returns their failure or null, and
/// makes the draft the snapshot of all `writers` (finish_draft, also for `names` and `hosts`, which may come
/// meanwhile). Waits also where its own part failed: others' files stay until they are done with them, so that none of
/// them hears of that as its own. Returns the snapshot's folder; else drops the draft and throws the own failure,
/// theirs, or as finish_draft.
std::filesystem::path write_and_finish(const std::filesystem::path& draft, const std::string& writer,
                                       const NextRuns& next, const std::function<std::exception_ptr()>& await_others,
                                       const std::vector<std::string>& writers, const Metadata& metadata,
                                       const SnapshotOptions& options,
                                       const std::map<std::string, std::string>& names = {},
                                       const std::map<std::string, std::string>& hosts = {});

}  // namespace muster::checkpoint
