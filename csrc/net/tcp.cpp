#include "net/tcp.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "muster/error.h"

namespace muster::net {
namespace {

addrinfo stream_hints() {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  return hints;
}

// Where a socket is, here or at the other end.
struct BoundTo {
  sockaddr_storage storage{};
  socklen_t size = sizeof(sockaddr_storage);

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  // That of IPv4 is at the same place.
  uint16_t port() const { return ntohs(reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port); }
};

}  // namespace

HostPort split_address(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == address.size()) {
    throw InvalidArgument("address '" + address + "' is not of the form host:port");
  }
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  return {host, address.substr(colon + 1)};
}

Addresses resolve(const HostPort& at, std::string& why) {
  const addrinfo hints = stream_hints();
  addrinfo* found = nullptr;
  const int rc = ::getaddrinfo(at.host.c_str(), at.port.c_str(), &hints, &found);
  if (rc != 0) why = ::gai_strerror(rc);
  return {found, &::freeaddrinfo};
}

FileDescriptor try_to_connect(const addrinfo& to, Deadline deadline, int& error, const std::function<void()>& between) {
  FileDescriptor fd(::socket(to.ai_family, to.ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, to.ai_protocol));
  error = 0;
  if (fd && ::connect(fd.get(), to.ai_addr, to.ai_addrlen) == 0) return fd;
  error = errno;
  if (!fd || error != EINPROGRESS) return FileDescriptor();
  constexpr std::chrono::milliseconds kSlice{50};
  for (pollfd polled{fd.get(), POLLOUT, 0}; std::chrono::steady_clock::now() < deadline; between()) {
    const auto slice = std::min(deadline, std::chrono::steady_clock::now() + kSlice);
    if (::poll(&polled, 1, remaining_ms(slice)) <= 0) continue;
    socklen_t size = sizeof(error);
    ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    return error == 0 ? std::move(fd) : FileDescriptor();
  }
  error = ETIMEDOUT;
  return FileDescriptor();
}

std::string address_towards(const HostPort& at) {
  std::string why;
  const Addresses addresses = resolve(at, why);
  for (const addrinfo* a = addresses.get(); a != nullptr; a = a->ai_next) {
    // Connecting a datagram socket sends nothing: the system chooses the interface.
    const FileDescriptor fd(::socket(a->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    BoundTo own;
    std::array<char, NI_MAXHOST> number{};
    if (fd && ::connect(fd.get(), a->ai_addr, a->ai_addrlen) == 0 &&
        ::getsockname(fd.get(), own.get(), &own.size) == 0 &&
        ::getnameinfo(own.get(), own.size, number.data(), number.size(), nullptr, 0, NI_NUMERICHOST) == 0) {
      return number.data();
    }
    why = std::strerror(errno);
  }
  throw CommError("no interface of this host leads to " + at.host + ": " + why +
                  "; set MASTER_ADDR to an address of rank 0's host that all hosts reach");
}

bool is_loopback(const std::string& address) {
  return address == "::1" || address.starts_with("127.") || address.starts_with("::ffff:127.");
}

TcpListener::TcpListener(const std::string& address) {
  std::string why;
  const Addresses addresses = resolve({address, "0"}, why);
  BoundTo own;
  if (addresses) {
    socket_ = FileDescriptor(::socket(addresses->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket_ || ::bind(socket_.get(), addresses->ai_addr, addresses->ai_addrlen) != 0 ||
        ::listen(socket_.get(), SOMAXCONN) != 0 || ::getsockname(socket_.get(), own.get(), &own.size) != 0) {
      why = std::strerror(errno);
    } else {
      port_ = own.port();
    }
  }
  if (port_ == 0) {
    throw CommError("cannot listen at " + address + ", by which this host reaches the rendezvous: " + why +
                    "; set MASTER_ADDR to an address of rank 0's host that all hosts reach");
  }
}

}  // namespace muster::net
