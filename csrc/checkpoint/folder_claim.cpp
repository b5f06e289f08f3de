#include "checkpoint/folder_claim.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <exception>
#include <optional>
#include <ratio>
#include <string>
#include <system_error>
#include <utility>

#include "checkpoint/file.h"
#include "checkpoint/unforked_file.h"
#include "muster/error.h"

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

// Of a folder that nobody has claimed, that has been emptied since, or that is an older one of a backup: whoever knew
// it before must not take its new owner for an earlier one. Quarters of a second since 2026, which last until 2060: no
// process starts more often. The folder's own count decides where the clock goes back.
uint64_t life_by_clock() {
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

}  // namespace

FolderClaim::FolderClaim(fs::path folder) : folder_(std::move(folder)) {
  with_folder(folder_, [&] {
    make_folder(folder_);
    const auto path = folder_ / kLock;
    lock_ = std::make_shared<UnforkedFile>(path);
    if (lock_->get() < 0) throw fs::filesystem_error("open", path, std::error_code(errno, std::generic_category()));
    if (::flock(lock_->get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      throw CheckpointError("another process uses the folder '" + folder_.string() +
                            "', or another strategy or server of this one; end that one, or give each a folder of its "
                            "own");
    }
    life_ = std::max(read_life(folder_ / kLife).value_or(0) + 1, life_by_clock());
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

std::string mark_of_claim(const fs::path& folder) noexcept {
  try {
    const net::FileDescriptor lock(::open((folder / kLock).c_str(), O_RDONLY | O_CLOEXEC));
    struct ::stat file{};
    if (!lock || ::fstat(lock.get(), &file) != 0) return "";
    if (::flock(lock.get(), LOCK_SH | LOCK_NB) == 0) {
      ::flock(lock.get(), LOCK_UN);  // also where a fork has the file open from here on
      return "";
    }
    if (errno != EWOULDBLOCK) return "";  // there are no locks
    return std::to_string(file.st_ino) + '.' + std::to_string(read_life(folder / kLife).value_or(0));
  } catch (const std::exception&) {  // who claims it then says why
    return "";
  }
}

}  // namespace muster::checkpoint
