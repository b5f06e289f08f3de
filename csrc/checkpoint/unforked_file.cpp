#include "checkpoint/unforked_file.h"

#include <fcntl.h>
#include <sys/file.h>

#include "checkpoint/file.h"

namespace muster::checkpoint {

namespace fs = std::filesystem;

UnforkedFile::UnforkedFile(const fs::path& path)
    : fd_([&] {
        net::FileDescriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
        if (file) share_as(path.parent_path(), file.get());
        return file;
      }) {}

bool is_unlocked(const fs::path& path) noexcept {
  const net::FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  return file && ::flock(file.get(), LOCK_SH | LOCK_NB) == 0;
}

}  // namespace muster::checkpoint
