#include "net/shared_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "muster/error.h"

namespace muster::net {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

[[noreturn]] void fail_to_map(const std::string& what) {
  throw CommError(what + ": " + std::strerror(errno) +
                  ". Check the memory limit of the container and the address space limit (ulimit -v)");
}

}  // namespace

Mapping::Mapping(int fd, size_t bytes) {
  struct stat status{};
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (::fstat(fd, &status) != 0 || seals < 0 || (seals & kSeals) != kSeals ||
      static_cast<size_t>(status.st_size) != bytes) {
    throw CommError(
        "a worker of this host offered shared memory of an unexpected kind or size; run one version of Muster on all "
        "workers");
  }
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (data == MAP_FAILED) {
    throw CommError("cannot map " + std::to_string(bytes) +
                    " bytes of address space for shared memory: " + std::strerror(errno) +
                    ". Raise the limit of address space (ulimit -v), and close() strategies that are no longer needed: "
                    "each takes about three times the machine's memory for every worker, of addresses alone");
  }
  // A core dump would give memory to every page of an address space as large as the machine's memory.
  ::madvise(data, bytes, MADV_DONTDUMP);
  data_ = static_cast<std::byte*>(data);
  size_ = bytes;
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

FileDescriptor make_segment(const char* name, size_t bytes) {
  FileDescriptor fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd || ::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0 ||
      ::fcntl(fd.get(), F_ADD_SEALS, kSeals | F_SEAL_SEAL) != 0) {
    fail_to_map("cannot make shared memory");
  }
  return fd;
}

void reserve(int fd, size_t offset, size_t bytes) {
  while (::fallocate(fd, FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0) {
    if (errno != EINTR) fail_to_map("cannot reserve " + std::to_string(bytes) + " bytes of shared memory");
  }
}

Arena::Arena(size_t capacity)
    : fd_(make_segment("muster-arena", capacity)), mapping_(fd_.get(), capacity), owner_process_(getpid()) {
  free_[0] = capacity;
}

std::byte* Arena::allocate(size_t bytes) {
  bytes = std::max(kPage, (bytes + kPage - 1) / kPage * kPage);
  size_t offset = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto place =
        std::find_if(free_.begin(), free_.end(), [&](const auto& range) { return range.second >= bytes; });
    if (place == free_.end()) {
      throw CommError("no room for " + std::to_string(bytes) + " bytes among " + std::to_string(capacity()) +
                      " of shared memory; release communication buffers that are no longer needed");
    }
    offset = place->first;
    const size_t rest = place->second - bytes;
    free_.erase(place);
    if (rest > 0) free_[offset + bytes] = rest;
    used_[offset] = bytes;
  }
  std::byte* const data = mapping_.data() + offset;
  try {
    reserve(fd_.get(), offset, bytes);
  } catch (const CommError&) {
    release(data);
    throw;
  }
#ifdef MADV_POPULATE_WRITE
  ::madvise(data, bytes, MADV_POPULATE_WRITE);  // saves page faults later; older kernels refuse, which is harmless
#endif
  return data;
}

void Arena::release(std::byte* data) noexcept {
  if (getpid() != owner_process_) return;
  const std::lock_guard lock(mutex_);
  const auto used = used_.find(static_cast<size_t>(data - mapping_.data()));
  if (used == used_.end()) return;
  size_t first = used->first, bytes = used->second;
  ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(first),
              static_cast<off_t>(bytes));
  used_.erase(used);
  auto after = free_.lower_bound(first);
  if (after != free_.end() && after->first == first + bytes) {
    bytes += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == first) {
      before->second += bytes;
      return;
    }
  }
  free_[first] = bytes;
}

}  // namespace muster::net
