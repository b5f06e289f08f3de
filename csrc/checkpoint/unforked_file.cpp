#include "checkpoint/unforked_file.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <unistd.h>

#include <mutex>
#include <set>

#include "checkpoint/file.h"

namespace muster::checkpoint {

namespace {

namespace fs = std::filesystem;

// The descriptors of this process's UnforkedFiles. A fork would have them open, too, and a lock is held until all who
// have it open are gone: a worker of a data loader that outlives a killed process by seconds would keep the folder from
// the job that is started next.
struct OpenFiles {
  std::mutex mutex;
  std::set<int> numbers;  // guarded by mutex
};

OpenFiles& open_files() {
  static auto& instance = *new OpenFiles;  // there as long as static objects that hold files
  static std::once_flag once;
  std::call_once(once, [] {
    ::pthread_atfork([] { instance.mutex.lock(); }, [] { instance.mutex.unlock(); },
                     [] {
                       const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
                       // The numbers stay taken: their owners close them.
                       for (const int number : instance.numbers) {
                         if (nothing < 0 || ::dup3(nothing, number, O_CLOEXEC) < 0) ::close(number);
                       }
                       ::close(nothing);
                       instance.numbers.clear();
                       instance.mutex.unlock();
                     });
  });
  return instance;
}

}  // namespace

UnforkedFile::UnforkedFile(const fs::path& path) {
  const std::lock_guard lock(open_files().mutex);
  fd_ = net::FileDescriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (fd_) share_as(path.parent_path(), fd_.get());
  if (fd_) open_files().numbers.insert(fd_.get());
}

UnforkedFile::~UnforkedFile() {
  const std::lock_guard lock(open_files().mutex);
  open_files().numbers.erase(fd_.get());
  fd_ = {};
}

bool is_unlocked(const fs::path& path) noexcept {
  const net::FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  return file && ::flock(file.get(), LOCK_SH | LOCK_NB) == 0;
}

}  // namespace muster::checkpoint
