// Descriptors that belong to this process alone.
#pragma once

#include <functional>

#include "net/unix_socket.h"

namespace muster::net {

/// A descriptor that has been closed in whatever this process has forked since: a file's lock is dropped, and a peer
/// sees a connection end, with this process, and not with children that outlive it, such as a data loader's workers.
/// In a child get() is an empty file.
class UnforkedDescriptor {
 public:
  UnforkedDescriptor() = default;
  /// What `open` returns, which may be empty. No fork comes while it runs.
  explicit UnforkedDescriptor(const std::function<FileDescriptor()>& open);
  UnforkedDescriptor(UnforkedDescriptor&& other) noexcept = default;
  UnforkedDescriptor& operator=(UnforkedDescriptor&& other) noexcept = default;
  ~UnforkedDescriptor();

  int get() const noexcept { return descriptor_.get(); }
  explicit operator bool() const noexcept { return static_cast<bool>(descriptor_); }

 private:
  FileDescriptor descriptor_;
};

}  // namespace muster::net
