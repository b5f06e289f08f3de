#include "net/unix_socket.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <limits>
#include <thread>

#include "core/wait_hook.h"
#include "muster/error.h"

namespace muster::net {
namespace {

constexpr int kBacklog = 1024;  // which the system cuts, to 128 where it is old
constexpr std::chrono::milliseconds kBetweenCalls{1};
constexpr std::chrono::milliseconds kSendSlice{50};  // between calls of the WaitHook

[[noreturn]] void fail_at_socket(const std::string& what) {
  throw CommError(what + ": " + std::strerror(errno) +
                  ". Check the process's limits (ulimit -n) and that all workers of the host run in one container");
}

FileDescriptor make_socket(int type) {
  FileDescriptor fd(::socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) fail_at_socket("cannot make a Unix socket");
  return fd;
}

std::pair<sockaddr_un, socklen_t> abstract_address(const std::string& name) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof(address.sun_path)) throw InvalidArgument("socket name '" + name + "' is too long");
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

}  // namespace

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

UnixSocket UnixSocket::connect(const std::string& name, Deadline deadline) {
  return UnixSocket(connect_to(name, SOCK_SEQPACKET, deadline));
}

PeerCredentials UnixSocket::credentials() const { return credentials_of(fd_); }

void UnixSocket::send(const std::string& bytes, const std::vector<int>& descriptors, Deadline deadline) const {
  if (bytes.size() > kMaxBytes || descriptors.size() > kMaxDescriptors) {
    throw InvalidArgument("a message of " + std::to_string(bytes.size()) + " bytes and " +
                          std::to_string(descriptors.size()) + " descriptors is too large for a Unix socket");
  }
  iovec data{const_cast<char*>(bytes.data()), bytes.size()};
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxDescriptors * sizeof(int))> control{};
  if (!descriptors.empty()) {
    const size_t size = descriptors.size() * sizeof(int);
    header.msg_control = control.data();
    header.msg_controllen = CMSG_SPACE(size);
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(size);
    std::memcpy(CMSG_DATA(rights), descriptors.data(), size);
  }
  while (::sendmsg(fd_.get(), &header, MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    if (errno == EPIPE || errno == ECONNRESET) throw PeerGone("a worker of this host is gone; look at its log");
    if (errno != EAGAIN && errno != EWOULDBLOCK) fail_at_socket("a worker of this host cannot be sent a message");
    if (std::chrono::steady_clock::now() >= deadline)
      throw Timeout("a worker of this host does not read its messages; look at its log");
    pollfd wait{fd_.get(), POLLOUT, 0};
    ::poll(&wait, 1, remaining_ms(std::min(deadline, std::chrono::steady_clock::now() + kSendSlice)));
    WaitHook::call();
  }
}

UnixSocket::Status UnixSocket::receive(Message& message) const {
  message.bytes.resize(kMaxBytes);
  message.descriptors.clear();
  iovec data{message.bytes.data(), message.bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kMaxDescriptors * sizeof(int))> control;
  msghdr header{};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  header.msg_control = control.data();
  header.msg_controllen = control.size();
  ssize_t n;
  do {
    n = ::recvmsg(fd_.get(), &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Status::nothing;
  if (n <= 0) return Status::end;
  message.bytes.resize(static_cast<size_t>(n));
  for (cmsghdr* c = CMSG_FIRSTHDR(&header); c != nullptr; c = CMSG_NXTHDR(&header, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
      message.descriptors.emplace_back(fd);
    }
  }
  if (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) {
    throw CommError("a message or its descriptors were cut short; raise the limit of open files (ulimit -n)");
  }
  return Status::message;
}

UnixListener::UnixListener(const std::string& name) : fd_(listen_at(name, SOCK_SEQPACKET)) {}

std::optional<UnixSocket> UnixListener::accept(Deadline deadline) const {
  FileDescriptor fd = accept_from(fd_, deadline);
  if (!fd) return std::nullopt;
  return UnixSocket(std::move(fd));
}

FileDescriptor listen_at(const std::string& name, int type) {
  FileDescriptor fd = make_socket(type);
  const auto [address, length] = abstract_address(name);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    if (errno == EADDRINUSE) {
      throw CommError("the name '" + name +
                      "' is taken: another process of this host listens there; end it, or choose "
                      "another name");
    }
    fail_at_socket("cannot bind a Unix socket");
  }
  if (::listen(fd.get(), kBacklog) != 0) fail_at_socket("cannot listen on a Unix socket");
  return fd;
}

FileDescriptor connect_to(const std::string& name, int type, Deadline deadline) {
  FileDescriptor fd = make_socket(type);
  const auto [address, length] = abstract_address(name);
  while (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) {
    if (errno == EINTR) continue;
    if (errno == EAGAIN) {
      if (std::chrono::steady_clock::now() >= deadline)
        throw Timeout("the process at '" + name + "' takes no connections; look at its log");
      WaitHook::call();
      std::this_thread::sleep_for(kBetweenCalls);
      continue;
    }
    if (errno == ECONNREFUSED) {
      throw CommError("nobody listens at '" + name +
                      "': the process has ended, has not begun, or runs in another container");
    }
    fail_at_socket("cannot reach a process of this host");
  }
  return fd;
}

FileDescriptor accept_from(const FileDescriptor& listener, Deadline deadline) {
  while (wait_readable({listener.get()}, deadline)) {
    FileDescriptor fd(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd) return fd;
    if (errno != EINTR && errno != EAGAIN && errno != ECONNABORTED) fail_at_socket("cannot accept a connection");
  }
  return FileDescriptor();
}

PeerCredentials credentials_of(const FileDescriptor& socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0)
    fail_at_socket("cannot read a peer's credentials");
  return {credentials.pid, credentials.uid};
}

std::string random_name() {
  std::array<unsigned char, 16> bytes;
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    fail_at_socket("no random numbers");
  std::string name;
  for (const unsigned char byte : bytes) {
    name += "0123456789abcdef"[byte >> 4];
    name += "0123456789abcdef"[byte & 15];
  }
  return name;
}

std::string host_identity() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  struct stat network{};
  ::stat("/proc/self/ns/net", &network);
  return boot + "/" + std::to_string(network.st_ino);
}

int remaining_ms(Deadline deadline) {
  const auto now = std::chrono::steady_clock::now();
  if (deadline <= now) return 0;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - now).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, std::numeric_limits<int>::max()));
}

bool poll_until(std::span<pollfd> polled, Deadline deadline) {
  for (;;) {
    const int n = ::poll(polled.data(), polled.size(), remaining_ms(deadline));
    if (n > 0) return true;
    if (n == 0 && std::chrono::steady_clock::now() >= deadline) return false;
    if (n < 0 && errno != EINTR) fail_at_socket("cannot wait for a socket");
  }
}

bool wait_readable(const std::vector<int>& fds, Deadline deadline) {
  std::vector<pollfd> polled;
  for (const int fd : fds) polled.push_back({fd, POLLIN, 0});
  return poll_until(polled, deadline);
}

FileDescriptor watch_process(pid_t pid) noexcept {
  if (pid <= 0) return FileDescriptor();
  return FileDescriptor(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

}  // namespace muster::net
