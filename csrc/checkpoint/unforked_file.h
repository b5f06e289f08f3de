// Files that hold locks (flock(2)), which the system drops with the process that has them open.
#pragma once

#include <filesystem>

#include "net/unforked.h"

namespace muster::checkpoint {

/// A file that is open, and has been closed in whatever this process has forked since: a child that outlives a killed
/// process would keep the folder from the job that is started next.
class UnforkedFile {
 public:
  /// Makes the file where it is not there. get() is -1 where the system refuses; errno says why.
  explicit UnforkedFile(const std::filesystem::path& path);

  int get() const noexcept { return fd_.get(); }

 private:
  net::UnforkedDescriptor fd_;
};

/// Whether there is such a file, and nobody holds a lock on it.
bool is_unlocked(const std::filesystem::path& path) noexcept;

}  // namespace muster::checkpoint
