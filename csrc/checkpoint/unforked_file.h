// Files that hold locks (flock(2)), which the system drops with the process that has them open.
#pragma once

#include <filesystem>

#include "net/unix_socket.h"

namespace muster::checkpoint {

/// A file that is open, and has been closed in whatever this process has forked since.
class UnforkedFile {
 public:
  /// Makes the file where it is not there. get() is -1 where the system refuses; errno says why.
  explicit UnforkedFile(const std::filesystem::path& path);
  ~UnforkedFile();
  UnforkedFile(const UnforkedFile&) = delete;
  UnforkedFile& operator=(const UnforkedFile&) = delete;

  int get() const noexcept { return fd_.get(); }

 private:
  net::FileDescriptor fd_;
};

/// Whether there is such a file, and nobody holds a lock on it.
bool is_unlocked(const std::filesystem::path& path) noexcept;

}  // namespace muster::checkpoint
