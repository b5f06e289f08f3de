#include "checkpoint/folder_claim.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <mutex>
#include <optional>
#include <ratio>
#include <set>
#include <string>
#include <system_error>
#include <utility>

#include "checkpoint/file.h"
#include "muster/error.h"
#include "net/unix_socket.h"

namespace muster::checkpoint {

namespace {

namespace fs = std::filesystem;

constexpr const char* kLock = "lock";
constexpr const char* kLife = "life";
constexpr const char* kNextLife = ".partial-life";
// Incarnations of workers have 32 bits for it.
constexpr uint64_t kMaxLife = (uint64_t{1} << 32) - 1;
constexpr size_t kMaxDigits = 10;

// Nothing where there is no file.
std::optional<uint64_t> read_life(const fs::path& path) {
  if (!fs::exists(path)) return std::nullopt;
  FileReader file(path);
  const auto text = file.size() <= kMaxDigits + 1 ? file.read_text(file.size()) : std::string();
  uint64_t life = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), life);
  if (error == std::errc() && life < kMaxLife && std::string(stop, text.data() + text.size()) == "\n") return life;
  throw CheckpointError("'" + path.string() + "' is damaged: it holds no number below " + std::to_string(kMaxLife) +
                        "; write into it one that is greater than any number of a life in the logs of this folder's " +
                        "servers, or end all of the job's processes and remove it");
}

// Of a folder that nobody has claimed, or that has been emptied since: whoever knew it before must not take its new
// owner for the old one. Quarters of a second since 2026, which last until 2060: no process starts more often.
uint64_t first_life() {
  using namespace std::chrono;
  using Quarters = duration<int64_t, std::ratio<1, 4>>;
  const auto since = system_clock::now() - sys_days(year(2026) / January / 1);
  return static_cast<uint64_t>(std::clamp<int64_t>(duration_cast<Quarters>(since).count(), 1, kMaxLife / 2));
}

// The system's errors as ours.
template <class Call>
void with_folder(const fs::path& folder, const Call& call) {
  try {
    call();
  } catch (const fs::filesystem_error& error) {
    throw CheckpointError("cannot use the folder '" + folder.string() + "': " + error.code().message() +
                          "; check its permissions and the space on its disk");
  }
}

// The descriptors of this process's UnforkedFiles. A fork would have them open, too, and a lock is held until all who
// have it open are gone: a worker of a data loader that outlives a killed process by seconds would keep the folder from
// the job that is started next.
struct OpenFiles {
  std::mutex mutex;
  std::set<int> numbers;  // guarded by mutex
};

OpenFiles& open_files() {
  static OpenFiles instance;
  static std::once_flag once;
  std::call_once(once, [] {
    ::pthread_atfork([] { instance.mutex.lock(); }, [] { instance.mutex.unlock(); },
                     [] {
                       const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
                       // The numbers stay taken: their owners close them.
                       for (const int number : instance.numbers) ::dup3(nothing, number, O_CLOEXEC);
                       ::close(nothing);
                       instance.numbers.clear();
                       instance.mutex.unlock();
                     });
  });
  return instance;
}

}  // namespace

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

FolderClaim::FolderClaim(fs::path folder) : folder_(std::move(folder)) {
  with_folder(folder_, [&] {
    make_folder(folder_);
    const auto path = folder_ / kLock;
    lock_ = std::make_shared<UnforkedFile>(path);
    if (lock_->get() < 0) throw fs::filesystem_error("open", path, std::error_code(errno, std::generic_category()));
    if (::flock(lock_->get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      throw CheckpointError("another process uses the folder '" + folder_.string() +
                            "'; end that one, or give each server, or job, a folder of its own");
    }
    const auto last = read_life(folder_ / kLife);
    life_ = last ? *last + 1 : first_life();
    const std::string text = std::to_string(life_) + '\n';
    fs::remove(folder_ / kNextLife);
    FileWriter file(folder_ / kNextLife);
    file.write(text.data(), text.size());
    file.finish();
    fs::rename(folder_ / kNextLife, folder_ / kLife);
    flush_folder(folder_);
  });
}

void FolderClaim::check() const {
  with_folder(folder_, [&] {
    const auto life = read_life(folder_ / kLife);
    if (!life) {
      throw CheckpointError("the folder '" + folder_.string() + "' is gone, or what was in it; bring it back");
    }
    if (*life == life_) return;
    throw CheckpointError("another process has begun to use the folder '" + folder_.string() +
                          "', and this one writes nothing there any more; end one of them");
  });
}

}  // namespace muster::checkpoint
