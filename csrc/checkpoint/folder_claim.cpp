#include "checkpoint/folder_claim.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <string>
#include <system_error>
#include <utility>

#include "checkpoint/file.h"
#include "muster/error.h"

namespace muster::checkpoint {

namespace {

namespace fs = std::filesystem;

constexpr const char* kLock = "lock";
constexpr const char* kLife = "life";
constexpr const char* kNextLife = ".partial-life";
constexpr size_t kMaxDigits = 20;

uint64_t read_life(const fs::path& path) {
  if (!fs::exists(path)) return 0;
  FileReader file(path);
  const auto text = file.size() <= kMaxDigits + 1 ? file.read_text(file.size()) : std::string();
  uint64_t life = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), life);
  if (error == std::errc() && std::string(stop, text.data() + text.size()) == "\n") return life;
  throw CheckpointError("'" + path.string() + "' is damaged: it holds no number; write into it one that is greater " +
                        "than any number of a life in the logs of this folder's servers");
}

}  // namespace

FolderClaim::FolderClaim(fs::path folder) : folder_(std::move(folder)) {
  try {
    fs::create_directories(folder_);
    const auto path = folder_ / kLock;
    lock_ = net::FileDescriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (lock_.get() < 0) throw fs::filesystem_error("open", path, std::error_code(errno, std::generic_category()));
    if (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      throw CheckpointError("another process uses the folder '" + folder_.string() +
                            "'; end that one, or give each server, or job, a folder of its own");
    }
    life_ = read_life(folder_ / kLife) + 1;
    const std::string text = std::to_string(life_) + '\n';
    fs::remove(folder_ / kNextLife);
    FileWriter file(folder_ / kNextLife);
    file.write(text.data(), text.size());
    file.finish();
    fs::rename(folder_ / kNextLife, folder_ / kLife);
    flush_folder(folder_);
  } catch (const fs::filesystem_error& error) {
    throw CheckpointError("cannot use the folder '" + folder_.string() + "': " + error.code().message() +
                          "; check its permissions and the space on its disk");
  }
}

void FolderClaim::check() const {
  if (!fs::exists(folder_ / kLife)) {
    throw CheckpointError("the folder '" + folder_.string() + "' is gone, or what was in it; bring it back");
  }
  if (read_life(folder_ / kLife) == life_) return;
  throw CheckpointError("another process has begun to use the folder '" + folder_.string() +
                        "', and this one writes nothing there any more; end one of them");
}

}  // namespace muster::checkpoint
