// A sealed memfd, mapped. Nothing of it is left once its processes are gone, and since it can neither shrink nor grow
// and memory is reserved before use, no access to it can fail (but for what return_shared_pages() gave back, which is
// as other memory of a process).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "net/unix_socket.h"

namespace muster::net {

/// A mapping of a whole memfd. Move-only; unmaps at its end. Addresses stay valid as long as it lives.
class Mapping {
 public:
  Mapping() = default;
  /// Throws CommError when the descriptor is not a memfd of `bytes` sealed against resizing, or cannot be mapped.
  Mapping(int fd, size_t bytes);
  Mapping(Mapping&& other) noexcept { swap(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Mapping();

  std::byte* data() const noexcept { return data_; }
  size_t size() const noexcept { return size_; }

 private:
  void swap(Mapping& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }

  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

/// A memfd of `bytes` (address space; memory is taken by reserve), sealed against resizing.
FileDescriptor make_segment(const char* name, size_t bytes);

/// Takes memory for a range of a segment. Throws CommError when there is none.
void reserve(int fd, size_t offset, size_t bytes);

/// One rank's memory: a segment much larger than what is used, in which ranges are taken and given back. Thread-safe.
class Arena {
 public:
  static constexpr size_t kPage = 4096;

  explicit Arena(size_t capacity);

  int fd() const noexcept { return fd_.get(); }
  std::byte* data() const noexcept { return mapping_.data(); }
  size_t capacity() const noexcept { return mapping_.size(); }

  /// Zeroed bytes at a multiple of kPage. Throws CommError when memory or the capacity is used up.
  std::byte* allocate(size_t bytes);
  /// Gives `allocate`'s range back; its memory returns to the system. A forked child's call does nothing.
  void release(std::byte* data) noexcept;

 private:
  FileDescriptor fd_;
  Mapping mapping_;
  int owner_process_;
  std::mutex mutex_;
  std::map<size_t, size_t> free_;  // offset -> bytes, never adjacent; guarded by mutex_
  std::map<size_t, size_t> used_;  // offset -> bytes; guarded by mutex_
};

}  // namespace muster::net
