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

// Adds the section to what came before, empties it, and returns its checksum.
uint32_t end_of(FileSum& sum, FileSum& section) noexcept {
  const auto ended = std::exchange(section, {});
  sum = {sum.bytes + ended.bytes, crc32_combine(sum.crc32, ended.crc32, ended.bytes)};
  return ended.crc32;
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
    section_.crc32 = crc32(next, static_cast<size_t>(written), section_.crc32);
    section_.bytes += static_cast<uint64_t>(written);
    next += written;
    bytes -= static_cast<size_t>(written);
    const uint64_t so_far = sum_.bytes + section_.bytes;
    if (so_far - flushed_ < kFlushBytes) continue;
    if (::fdatasync(fd_.get()) != 0) fail("flush", path_, kWriteRemedy);
    flushed_ = so_far;
  }
}

uint32_t FileWriter::end_section() noexcept { return end_of(sum_, section_); }

FileSum FileWriter::finish() {
  end_of(sum_, section_);
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
    section_.crc32 = crc32(next, static_cast<size_t>(got), section_.crc32);
    section_.bytes += static_cast<uint64_t>(got);
    next += got;
    bytes -= static_cast<size_t>(got);
  }
}

uint32_t FileReader::end_section() noexcept { return end_of(sum_, section_); }

FileSum FileReader::sum() const noexcept {
  auto whole = sum_;
  auto section = section_;
  end_of(whole, section);
  return whole;
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
