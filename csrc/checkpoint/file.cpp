#include "checkpoint/file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <exception>
#include <iterator>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/crc32.h"
#include "core/log.h"
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
    fd = ::open(path.c_str(), flags | O_CLOEXEC, S_IRUSR | S_IWUSR);
  } while (fd < 0 && errno == EINTR);
  return net::FileDescriptor(fd);
}

bool is_folder(const std::filesystem::path& path) {
  struct stat status{};
  return ::stat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode);
}

void make_one(const std::filesystem::path& folder, mode_t mode) {
  if (::mkdir(folder.c_str(), mode) == 0) return;
  if (errno == EEXIST) {
    if (is_folder(folder)) return;  // another process was faster
    errno = ENOTDIR;
  }
  fail("make the folder", folder, kWriteRemedy);
}

// Below this a thread more takes longer to make than it saves.
constexpr uint64_t kBytesOfThread = uint64_t{16} << 20;
constexpr unsigned kMostThreads = 8;

// Calls `read` with each number below `count`, in threads that are worth `bytes`; one of them is this one. Rethrows the
// first error, after which no other number is begun.
template <class Read>
void in_threads(uint64_t bytes, size_t count, const Read& read) {
  std::atomic<size_t> next = 0;
  std::mutex mutex;
  std::exception_ptr error;
  const auto work = [&] {
    try {
      for (size_t i = next++; i < count; i = next++) read(i);
    } catch (...) {
      next = count;
      const std::lock_guard lock(mutex);
      if (!error) error = std::current_exception();
    }
  };
  const auto wanted =
      std::min<uint64_t>(std::min(std::thread::hardware_concurrency(), kMostThreads), bytes / kBytesOfThread);
  std::vector<std::jthread> others;
  try {
    while (others.size() + 1 < wanted) others.emplace_back(work);
  } catch (const std::system_error& error) {  // those that are there do it
    log(LogLevel::info, std::string("a file is read by fewer threads than there are cores: ") + error.what());
  }
  work();
  others.clear();
  if (error) std::rethrow_exception(error);
}

// Sets a flag for as long as it lives.
class Flag {
 public:
  explicit Flag(bool& flag) : flag_(flag) { flag_ = true; }
  ~Flag() { flag_ = false; }
  Flag(const Flag&) = delete;
  Flag& operator=(const Flag&) = delete;

 private:
  bool& flag_;
};

// What the system refuses to map, or to bring in, for other reasons than the file itself.
struct CannotMap : std::exception {};

// Of a file that is mapped: where its disk refuses, or it is shorter by now, this is an error instead of a signal.
void bring_in(std::byte* data, size_t bytes, const std::filesystem::path& path) {
  static const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(data) / page * page;
  const auto end = reinterpret_cast<uintptr_t>(data) + bytes;
  while (::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_READ) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EFAULT && errno != EHWPOISON) throw CannotMap();  // before Linux 5.14, say
    throw CheckpointError("'" + path.string() + "' ends early, or its disk does not give it; load another snapshot");
  }
}

// Whether a file is on a disk of this host: on others a file that is removed takes its memory with it.
bool is_local(int file) {
  struct statfs system{};
  if (::fstatfs(file, &system) != 0) return false;
  constexpr decltype(system.f_type) kLocal[] = {EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC,       BTRFS_SUPER_MAGIC,
                                                TMPFS_MAGIC,      OVERLAYFS_SUPER_MAGIC, F2FS_SUPER_MAGIC};
  return std::ranges::find(kLocal, system.f_type) != std::end(kLocal);
}

// Adds the section to what came before, empties it, and returns its checksum.
uint32_t end_of(FileSum& sum, FileSum& section) noexcept {
  const auto ended = std::exchange(section, {});
  sum = {sum.bytes + ended.bytes, crc32_combine(sum.crc32, ended.crc32, ended.bytes)};
  return ended.crc32;
}

}  // namespace

FileWriter::FileWriter(std::filesystem::path path, bool hashes)
    : path_(std::move(path)), fd_(open_file(path_, O_WRONLY | O_CREAT | O_EXCL)) {
  if (!fd_) fail("create", path_, kWriteRemedy);
  share_as(path_.parent_path(), fd_.get());
  if (hashes) hash_.emplace();
}

void FileWriter::write(const void* data, size_t bytes) {
  const auto* next = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(fd_.get(), next, std::min(bytes, kPieceBytes));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail("write", path_, kWriteRemedy);
    section_.crc32 = crc32(next, static_cast<size_t>(written), section_.crc32);
    section_.bytes += static_cast<uint64_t>(written);
    if (hash_) hash_->add(next, static_cast<size_t>(written));
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
  if (hash_) sum_.sha256 = hash_->digest();
  return sum_;
}

// Opening what is no file must not wait for it.
FileReader::FileReader(std::filesystem::path path, bool hashes)
    : path_(std::move(path)), fd_(open_file(path_, O_RDONLY | O_NONBLOCK)) {
  if (!fd_) fail("open", path_, kReadRemedy);
  struct stat status{};
  if (::fstat(fd_.get(), &status) != 0) fail("look at", path_, kReadRemedy);
  if (!S_ISREG(status.st_mode)) {
    throw CheckpointError("'" + path_.string() + "' is not a regular file; load another snapshot");
  }
  size_ = static_cast<uint64_t>(status.st_size);
  if (hashes) hash_.emplace();
}

uint32_t FileReader::read_at(uint64_t position, std::byte* data, size_t bytes, uint32_t before) {
  if (is_mapped_) {
    bring_in(data, bytes, path_);
    return crc32(data, bytes, before);
  }
  while (bytes > 0) {
    const ssize_t got = ::pread(fd_.get(), data, std::min(bytes, kPieceBytes), static_cast<off_t>(position));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read", path_, kReadRemedy);
    if (got == 0) throw CheckpointError("'" + path_.string() + "' ends early; load another snapshot");
    before = crc32(data, static_cast<size_t>(got), before);
    position += static_cast<uint64_t>(got);
    data += got;
    bytes -= static_cast<size_t>(got);
  }
  return before;
}

void FileReader::read(void* data, size_t bytes) {
  auto* next = static_cast<std::byte*>(data);
  while (bytes > 0) {
    const size_t piece = std::min(bytes, kPieceBytes);
    section_.crc32 = read_at(position(), next, piece, section_.crc32);
    section_.bytes += piece;
    if (hash_) hash_->add(next, piece);
    next += piece;
    bytes -= piece;
  }
}

std::vector<uint32_t> FileReader::read_sections(std::span<const Section> sections) {
  end_section();
  std::vector<uint32_t> sums;
  if (hash_) {
    for (const auto& section : sections) {
      read(section.data, section.bytes);
      sums.push_back(end_section());
    }
    return sums;
  }
  struct Piece {
    size_t section;
    uint64_t position;
    std::byte* data;
    size_t bytes;
    uint32_t crc32;
  };
  std::vector<Piece> pieces;
  uint64_t next = position();
  for (size_t s = 0; s < sections.size(); ++s) {
    auto* const data = static_cast<std::byte*>(sections[s].data);
    for (size_t done = 0; done < sections[s].bytes; done += pieces.back().bytes) {
      pieces.push_back({s, next + done, data + done, std::min(sections[s].bytes - done, kPieceBytes), 0});
    }
    next += sections[s].bytes;
  }
  in_threads(next - position(), pieces.size(),
             [&](size_t i) { pieces[i].crc32 = read_at(pieces[i].position, pieces[i].data, pieces[i].bytes, 0); });
  sums.assign(sections.size(), 0);
  for (const auto& piece : pieces) {
    sums[piece.section] = crc32_combine(sums[piece.section], piece.crc32, piece.bytes);
  }
  for (size_t s = 0; s < sections.size(); ++s) {
    section_ = {.bytes = sections[s].bytes, .crc32 = sums[s]};
    end_section();
  }
  return sums;
}

std::shared_ptr<std::byte> FileReader::map_sections(std::span<const size_t> sizes, std::vector<uint32_t>& crc32s) {
  end_section();
  const auto first = position();
  if (first == size_ || hash_ || !is_local(fd_.get())) return nullptr;
  void* const found = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd_.get(), 0);
  if (found == MAP_FAILED) return nullptr;
  std::shared_ptr<std::byte> map(static_cast<std::byte*>(found),
                                 [size = size_](std::byte* begin) { ::munmap(begin, size); });
  std::vector<Section> sections;
  auto* next = map.get() + first;
  for (const size_t bytes : sizes) {
    sections.push_back({next, bytes});
    next += bytes;
  }
  try {
    const Flag mapped(is_mapped_);
    crc32s = read_sections(sections);
  } catch (const CannotMap&) {  // none of the sections has been added to the sum
    return nullptr;
  }
  return {map, map.get() + first};
}

uint32_t FileReader::end_section() noexcept { return end_of(sum_, section_); }

FileSum FileReader::sum() const {
  auto whole = sum_;
  auto section = section_;
  end_of(whole, section);
  if (hash_) whole.sha256 = hash_->digest();
  return whole;
}

std::string FileReader::read_text(size_t bytes) {
  std::string text(bytes, '\0');
  read(text.data(), bytes);
  return text;
}

// A folder whose name a crash could take away holds nothing durable.
void make_folder(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> missing;
  struct stat status{};
  for (auto next = folder; !is_folder(next); next = next.parent_path()) {
    if (next.empty() || (next != folder && ::stat(next.c_str(), &status) == 0)) break;  // what is in a file's place
    if (next.has_filename() && next.filename() != ".") missing.push_back(next);
  }
  // The last one in the path is to be private; those above it are everybody's business.
  for (auto it = missing.rbegin(); it != missing.rend(); ++it) {
    make_one(*it, std::next(it) == missing.rend() ? S_IRWXU : S_IRWXU | S_IRWXG | S_IRWXO);
    flush_folder(it->has_parent_path() ? it->parent_path() : ".");
  }
}

void make_folder_in(const std::filesystem::path& parent, const std::string& name) {
  const auto path = parent / name;
  if (::mkdir(path.c_str(), S_IRWXU) != 0) fail("make the folder", path, kWriteRemedy);
  if (const auto made = open_file(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW)) share_as(parent, made.get());
}

void share_as(const std::filesystem::path& folder, int file) noexcept {
  struct stat around{};
  struct stat made{};
  if (::stat(folder.empty() ? "." : folder.c_str(), &around) != 0 || ::fstat(file, &made) != 0) return;
  if ((around.st_mode & S_ISGID) == 0) return;
  const mode_t rights = around.st_mode & (S_ISDIR(made.st_mode) ? S_IRWXG : S_IRGRP | S_IWGRP);
  ::fchmod(file, (made.st_mode & ALLPERMS) | rights);  // some file systems keep no modes
}

void flush_folder(const std::filesystem::path& folder) {
  const auto fd = open_file(folder, O_RDONLY | O_DIRECTORY);
  if (!fd || ::fsync(fd.get()) != 0) fail("flush", folder, kWriteRemedy);
}

}  // namespace muster::checkpoint
