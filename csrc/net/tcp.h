// TCP sockets between the hosts of a job.
#pragma once

#include <netdb.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "net/unix_socket.h"

namespace muster::net {

struct HostPort {
  std::string host;  ///< a name or a number; of IPv6 without brackets
  std::string port;
};

/// Of "host:port" and "[host]:port". Throws InvalidArgument for what is neither.
HostPort split_address(const std::string& address);

using Addresses = std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)>;

/// The addresses that a host's name stands for. Null where there are none, and `why` in words.
Addresses resolve(const HostPort& at, std::string& why);

/// A connected socket, non-blocking; empty, and `error` an errno, where nobody accepts there or the deadline has come.
/// Calls `between` every 50 ms.
FileDescriptor try_to_connect(const addrinfo& to, Deadline deadline, int& error, const std::function<void()>& between);

/// The address, a number, of the interface by which this host reaches `at`, which need not listen. Throws CommError
/// where it cannot.
std::string address_towards(const HostPort& at);

/// Whether an address, a number, is of the loopback, by which no other host comes.
bool is_loopback(const std::string& address);

/// Listens at a port that is free.
class TcpListener {
 public:
  /// `address`: of the interface, a number. Throws CommError where the system refuses.
  explicit TcpListener(const std::string& address);

  uint16_t port() const noexcept { return port_; }
  /// The next connection, non-blocking, or an empty descriptor at the deadline.
  FileDescriptor accept(Deadline deadline) const { return accept_from(socket_, deadline); }

 private:
  FileDescriptor socket_;
  uint16_t port_ = 0;
};

}  // namespace muster::net
