#include "checkpoint/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "checkpoint/crc32.h"
#include "muster/error.h"

namespace muster::checkpoint {

namespace {

// One call for a large file takes several times as long, and what is read is still in the cache for its checksum.
constexpr size_t kPieceBytes = size_t{4} << 20;

// What is written goes to the disk on the way: whoever looks on sees progress, and no minutes of flushing are left for
// the end.
constexpr uint64_t kFlushBytes = uint64_t{256} << 20;

[[noreturn]] void fail(const char* what, const std::filesystem::path& path, const char* remedy) {
  const int error = errno;
  throw CheckpointError(std::string("cannot ") + what + " '" + path.string() + "': " + std::strerror(error) + "; " +
                        remedy);
}

constexpr const char* kWriteRemedy = "check the folder's permissions and the space on its disk";
constexpr const char* kReadRemedy = "check the path, its permissions and its disk";

net::FileDescriptor open_file(const std::filesystem::path& path, int flags) {
  int fd;
  do {
    fd = ::open(path.c_str(), flags | O_CLOEXEC, 0666);
  } while (fd < 0 && errno == EINTR);
  return net::FileDescriptor(fd);
}

}  // namespace

FileWriter::FileWriter(std::filesystem::path path)
    : path_(std::move(path)), fd_(open_file(path_, O_WRONLY | O_CREAT | O_EXCL)) {
  if (!fd_) fail("create", path_, kWriteRemedy);
}

void FileWriter::write(const void* data, size_t bytes) {
  const auto* next = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(fd_.get(), next, std::min(bytes, kPieceBytes));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write", path_, kWriteRemedy);
    sum_.crc32 = crc32(next, static_cast<size_t>(written), sum_.crc32);
    sum_.bytes += static_cast<uint64_t>(written);
    next += written;
    bytes -= static_cast<size_t>(written);
    if (sum_.bytes - flushed_ < kFlushBytes) continue;
    if (::fdatasync(fd_.get()) != 0) fail("flush", path_, kWriteRemedy);
    flushed_ = sum_.bytes;
  }
}

FileSum FileWriter::finish() {
  if (::fsync(fd_.get()) != 0) fail("flush", path_, kWriteRemedy);
  fd_ = {};
  return sum_;
}

// Opening what is no file must not wait for it.
FileReader::FileReader(std::filesystem::path path)
    : path_(std::move(path)), fd_(open_file(path_, O_RDONLY | O_NONBLOCK)) {
  if (!fd_) fail("open", path_, kReadRemedy);
  struct stat status{};
  if (::fstat(fd_.get(), &status) != 0) fail("look at", path_, kReadRemedy);
  if (!S_ISREG(status.st_mode)) {
    throw CheckpointError("'" + path_.string() + "' is not a regular file; load another snapshot");
  }
  size_ = static_cast<uint64_t>(status.st_size);
}

void FileReader::read(void* data, size_t bytes) {
  auto* next = static_cast<std::byte*>(data);
  while (bytes > 0) {
    const ssize_t got = ::read(fd_.get(), next, std::min(bytes, kPieceBytes));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read", path_, kReadRemedy);
    if (got == 0) throw CheckpointError("'" + path_.string() + "' ends early; load another snapshot");
    sum_.crc32 = crc32(next, static_cast<size_t>(got), sum_.crc32);
    sum_.bytes += static_cast<uint64_t>(got);
    next += got;
    bytes -= static_cast<size_t>(got);
  }
}

std::string FileReader::read_text(size_t bytes) {
  std::string text(bytes, '\0');
  read(text.data(), bytes);
  return text;
}

void flush_folder(const std::filesystem::path& folder) {
  const auto fd = open_file(folder, O_RDONLY | O_DIRECTORY);
  if (!fd || ::fsync(fd.get()) != 0) fail("flush", folder, kWriteRemedy);
}

}  // namespace muster::checkpoint
