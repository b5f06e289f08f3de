// Abstract Unix sockets between the processes of one user on one host: messages with boundaries (SOCK_SEQPACKET) that
// can carry file descriptors. An abstract name leaves nothing in the file system.
#pragma once

#include <poll.h>
#include <sys/types.h>

#include <chrono>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "muster/error.h"

namespace muster::net {

using Deadline = std::chrono::steady_clock::time_point;

/// Owns a descriptor. Move-only.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) noexcept : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor();

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

struct Message {
  std::string bytes;
  std::vector<FileDescriptor> descriptors;
};

/// Who is at the other end, as the kernel says; pid is 0 for a process of another pid namespace.
struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
};

/// The other end of a socket is gone.
class PeerGone : public CommError {
 public:
  using CommError::CommError;
};

/// A connected socket. Externally synchronised per direction. Calls throw CommError where the system refuses.
class UnixSocket {
 public:
  static constexpr size_t kMaxBytes = 64 << 10;
  static constexpr size_t kMaxDescriptors = 250;

  UnixSocket() = default;
  explicit UnixSocket(FileDescriptor fd) noexcept : fd_(std::move(fd)) {}

  /// As connect_to.
  static UnixSocket connect(const std::string& name, Deadline deadline = Deadline::min());

  PeerCredentials credentials() const;

  /// Sends one message of at most kMaxBytes and kMaxDescriptors. Throws Timeout at the deadline, PeerGone.
  void send(const std::string& bytes, const std::vector<int>& descriptors, Deadline deadline) const;

  enum class Status { message, nothing, end };
  /// Takes one message if there is one; `end` once the peer is gone. Does not block.
  Status receive(Message& message) const;

  int get() const noexcept { return fd_.get(); }
  explicit operator bool() const noexcept { return static_cast<bool>(fd_); }

 private:
  FileDescriptor fd_;
};

/// A listening socket under an abstract name.
class UnixListener {
 public:
  explicit UnixListener(const std::string& name);

  /// The next connection, or none at the deadline.
  std::optional<UnixSocket> accept(Deadline deadline) const;

 private:
  FileDescriptor fd_;
};

/// 128 random bits in hexadecimal, for names that cannot be guessed.
std::string random_name();

/// Identifies the network namespace of the running kernel: equal exactly where abstract names can be reached.
std::string host_identity();

/// A listening socket of a type (SOCK_STREAM, SOCK_SEQPACKET) under an abstract name; non-blocking. Throws CommError
/// when the name is taken.
FileDescriptor listen_at(const std::string& name, int type);
/// Connects to one; where more wait to be accepted than the system lets queue, again until the deadline. Throws
/// CommError when nobody listens there.
FileDescriptor connect_to(const std::string& name, int type, Deadline deadline = Deadline::min());
/// The next connection to a listening socket, non-blocking, or an empty descriptor at the deadline.
FileDescriptor accept_from(const FileDescriptor& listener, Deadline deadline);
/// Who is at the other end of a connected Unix socket.
PeerCredentials credentials_of(const FileDescriptor& socket);

/// What poll takes: whole milliseconds until the deadline, at least 0, and at most what an int holds (24 days): whoever
/// waits looks at the deadline again.
int remaining_ms(Deadline deadline);

/// poll() until one of `polled` has what it waits for, or the deadline. Returns false at the deadline.
bool poll_until(std::span<pollfd> polled, Deadline deadline);

/// Waits until a descriptor of `fds` is readable or at its end, or the deadline. Returns false at the deadline.
bool wait_readable(const std::vector<int>& fds, Deadline deadline);

/// A descriptor that becomes readable when process `pid` ends; empty where the kernel cannot say.
FileDescriptor watch_process(pid_t pid) noexcept;

}  // namespace muster::net
