// Whether the process that writes a part of a draft is still there.
#pragma once

#include <filesystem>
#include <string>

#include "net/unix_socket.h"

namespace muster::checkpoint {

/// Held by who writes a part, until it is there, or has failed: a lock (flock(2)) on a file of the draft, which the
/// system drops with the process.
class PartClaim {
 public:
  /// Throws CheckpointError where the system refuses, or the file system has no such locks.
  PartClaim(const std::filesystem::path& draft, const std::string& writer);
  ~PartClaim();
  PartClaim(const PartClaim&) = delete;
  PartClaim& operator=(const PartClaim&) = delete;

 private:
  net::FileDescriptor fd_;
};

/// Whether somebody holds the claim of a writer's part.
bool is_claimed(const std::filesystem::path& draft, const std::string& writer) noexcept;

/// Whether a writer's part is there, as has_part. Throws CheckpointError also where the writer holds no claim any more
/// and has left neither a part nor a reason.
bool has_part_of_living(const std::filesystem::path& draft, const std::string& writer);

}  // namespace muster::checkpoint
