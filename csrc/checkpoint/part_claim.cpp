#include "checkpoint/part_claim.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>
#include <system_error>

#include "checkpoint/draft.h"
#include "checkpoint/file.h"
#include "muster/error.h"

namespace muster::checkpoint {

namespace {

namespace fs = std::filesystem;

fs::path claim_file(const fs::path& draft, const std::string& writer) { return draft / ("." + writer + ".claim"); }

}  // namespace

PartClaim::PartClaim(const fs::path& draft, const std::string& writer) {
  const auto path = claim_file(draft, writer);
  fd_ = net::FileDescriptor(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (fd_) share_as(draft, fd_.get());
  if (fd_ && ::flock(fd_.get(), LOCK_EX | LOCK_NB) == 0) return;
  throw CheckpointError("cannot lock '" + path.string() +
                        "': " + std::error_code(errno, std::generic_category()).message() +
                        "; save to a folder of this user's, on a file system that has locks (flock)");
}

// A fork of this process may have the file open, too.
PartClaim::~PartClaim() { ::flock(fd_.get(), LOCK_UN); }

bool is_claimed(const fs::path& draft, const std::string& writer) noexcept {
  const net::FileDescriptor fd(::open(claim_file(draft, writer).c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  return fd && ::flock(fd.get(), LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
}

bool has_part_of_living(const fs::path& draft, const std::string& writer) {
  const bool lives = is_claimed(draft, writer);
  if (has_part(draft, writer)) return true;
  if (lives) return false;
  throw CheckpointError(writer + " ended before it had written its part, or could not say why it did not");
}

}  // namespace muster::checkpoint
