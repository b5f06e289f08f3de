// A folder that one process writes at a time, and how often that was begun.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

namespace muster::checkpoint {

class UnforkedFile;

/// Holds a lock (flock(2)) on a file in the folder for as long as it lives; the system drops it with the process, whose
/// forks have no part in it. Where a file system has no such locks, the number alone tells writers apart.
class FolderClaim {
 public:
  /// Makes the folder, and counts the life in it, on the disk before this returns. Throws CheckpointError where another
  /// process holds the folder, or the system refuses.
  explicit FolderClaim(std::filesystem::path folder);

  const std::filesystem::path& folder() const noexcept { return folder_; }
  /// Of this claim, below 2^32: one more than that of the last one. In a folder that has none it begins with the clock,
  /// so that it is greater than what the folder had before it was removed.
  uint64_t life() const noexcept { return life_; }
  /// Throws CheckpointError where somebody else has claimed the folder since, it is gone, or the system refuses.
  void check() const;

 private:
  const std::filesystem::path folder_;
  std::shared_ptr<const UnforkedFile> lock_;
  uint64_t life_ = 0;
};

/// What tells a claim of a folder from others, without spaces; empty where nobody holds it, or that is not to be told.
std::string mark_of_claim(const std::filesystem::path& folder) noexcept;

}  // namespace muster::checkpoint
