// Files of a snapshot: written once, flushed to the disk, read front to back, with a checksum of what passed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/sha256.h"
#include "net/unix_socket.h"

namespace muster::checkpoint {

/// What a file holds.
struct FileSum {
  uint64_t bytes = 0;
  uint32_t crc32 = 0;
  std::string sha256 = {};  ///< hexadecimal; empty where it was not asked for

  bool operator==(const FileSum&) const = default;
};

/// Makes a folder that only its owner may enter (mode 0700), and where they are missing the folders above it, with the
/// modes that the umask leaves. One that is there stays as it is. All are on the disk before this returns. Throws
/// CheckpointError where the system refuses.
void make_folder(const std::filesystem::path& folder);

/// Makes a folder that was not there in another one: its owner's, and its group's where that one is shared.
void make_folder_in(const std::filesystem::path& parent, const std::string& name);

/// Gives a file that this process has made, which is its owner's alone, to its group too, where `folder`, in which it
/// is, has the set-group-ID bit: with the rights that the group has there. Others get none.
void share_as(const std::filesystem::path& folder, int file) noexcept;

/// A file that did not exist before: its owner's, and its group's where its folder is shared (see share_as). Owned by
/// one thread. Throws CheckpointError where the system refuses.
class FileWriter {
 public:
  /// `hashes`: whether its sum has the SHA-256.
  explicit FileWriter(std::filesystem::path path, bool hashes = false);

  void write(const void* data, size_t bytes);
  /// The checksum of what was written since the last call.
  uint32_t end_section() noexcept;
  /// Waits until everything is on the disk.
  FileSum finish();

 private:
  std::filesystem::path path_;
  net::FileDescriptor fd_;
  FileSum sum_;      // but for the section
  FileSum section_;  // since end_section()
  std::optional<Sha256> hash_;
  uint64_t flushed_ = 0;  // of the file's bytes
};

/// Memory that a part of a file is read into.
struct Section {
  void* data = nullptr;
  size_t bytes = 0;
};

/// A regular file. Owned by one thread. Throws CheckpointError where the system refuses or the file ends early.
class FileReader {
 public:
  explicit FileReader(std::filesystem::path path, bool hashes = false);  ///< `hashes`: as of a FileWriter

  uint64_t size() const noexcept { return size_; }  ///< of the file
  uint64_t rest() const noexcept { return size_ - position(); }
  void read(void* data, size_t bytes);
  /// Reads what follows into one section after another, and returns the checksum of each. Where they are large and no
  /// SHA-256 is asked for, which knows one order only, by a thread for each core that this process may use, 8 at most.
  std::vector<uint32_t> read_sections(std::span<const Section> sections);

  /// The rest of the file as the system has it in memory, where it is then read from: no memory is needed for it, and
  /// what is written there stays in this process. It stays until the last one lets go, also where the file is removed;
  /// but it follows a file that somebody writes to, and SIGBUS tells of one that is cut short, so that what is to stay
  /// is to be copied. Null, with nothing read, where the file is on a network, with a SHA-256, which is to hold for
  /// what is used, and where the system cannot. Sets `crc32s` to the checksum of each of the sections, whose sizes
  /// follow one another. Throws as read_sections, which it is in all else.
  std::shared_ptr<std::byte> map_sections(std::span<const size_t> sizes, std::vector<uint32_t>& crc32s);
  /// `bytes` of them, which must not be more than the rest.
  std::string read_text(size_t bytes);
  /// The checksum of what was read since the last call.
  uint32_t end_section() noexcept;
  /// Of what was read.
  FileSum sum() const;

 private:
  uint64_t position() const noexcept { return sum_.bytes + section_.bytes; }
  // Reads what is at `position` of the file, which is there already where it is mapped, and returns the checksum of it
  // and of what gave `before`. Thread-safe.
  uint32_t read_at(uint64_t position, std::byte* data, size_t bytes, uint32_t before);

  std::filesystem::path path_;
  net::FileDescriptor fd_;
  uint64_t size_ = 0;
  bool is_mapped_ = false;  // sections are the file itself
  FileSum sum_;             // but for the section
  FileSum section_;         // since end_section()
  std::optional<Sha256> hash_;
};

/// Waits until the names in a folder are on the disk. Throws CheckpointError.
void flush_folder(const std::filesystem::path& folder);

}  // namespace muster::checkpoint
