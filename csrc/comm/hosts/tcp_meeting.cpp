#include "comm/hosts/tcp_meeting.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <utility>
#include <vector>

#include "core/wait_hook.h"
#include "muster/error.h"
#include "net/tcp.h"

namespace muster::comm {
namespace {

using net::Deadline;
using net::FileDescriptor;

constexpr size_t kWordBytes = 32;  // of net::random_name

// What a peer says first.
struct Hello {
  std::array<char, kWordBytes> word{};
  int32_t rank = 0;
};

// Where a rank listens, and the word by which it knows its peers.
struct Listening {
  std::string number;
  std::string port;
  std::string word;
};

std::string key_of(int rank) { return "tcp/" + std::to_string(rank); }

// All of it, on a socket that does not block. False at the deadline, and where the connection ends.
bool send_all(int fd, const Hello& hello, Deadline deadline) {
  const auto* bytes = reinterpret_cast<const char*>(&hello);
  for (size_t sent = 0; sent < sizeof(hello);) {
    const ssize_t n = ::send(fd, bytes + sent, sizeof(hello) - sent, MSG_NOSIGNAL);
    if (n > 0) sent += static_cast<size_t>(n);
    if (n < 0 && errno != EAGAIN && errno != EINTR) return false;
    std::array<pollfd, 1> polled{pollfd{fd, POLLOUT, 0}};
    if (n < 0 && !net::poll_until(polled, deadline)) return false;
  }
  return true;
}

bool receive_all(int fd, Hello& hello, Deadline deadline) {
  auto* bytes = reinterpret_cast<char*>(&hello);
  for (size_t received = 0; received < sizeof(hello);) {
    if (!net::wait_readable({fd}, deadline)) return false;
    const ssize_t n = ::recv(fd, bytes + received, sizeof(hello) - received, 0);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return false;
    if (n > 0) received += static_cast<size_t>(n);
  }
  return true;
}

FileDescriptor call_peer(int peer, const Listening& theirs, const Hello& hello, Deadline deadline) {
  std::string why;
  const auto addresses = net::resolve({theirs.number, theirs.port}, why);
  if (addresses) {
    int error = 0;
    auto fd = net::try_to_connect(*addresses, deadline, error, WaitHook::call);
    if (fd && send_all(fd.get(), hello, deadline)) return fd;
    why = std::strerror(fd ? errno : error);
  }
  throw CommError(tcp_peer_name(peer) + " cannot be reached at " + theirs.number + ":" + theirs.port + ": " + why +
                  "; hosts of a job must reach one another on all ports");
}

}  // namespace

std::string tcp_peer_name(int rank) { return "worker " + std::to_string(rank); }

std::map<int, FileDescriptor> meet_over_tcp(c10d::Store& store, const TcpPlace& place, Milliseconds timeout) {
  constexpr std::chrono::milliseconds kSlice{50};
  constexpr std::chrono::seconds kPatience{5};  // with a stranger who says nothing
  const Deadline deadline = std::chrono::steady_clock::now() + timeout;
  const net::TcpListener listener(place.number);
  const std::string word = net::random_name();
  net::set_text(store, key_of(place.rank), place.number + " " + std::to_string(listener.port()) + " " + word);

  std::vector<std::string> keys;
  std::vector<std::string> who;
  for (const int peer : place.peers) {
    keys.push_back(key_of(peer));
    who.push_back(tcp_peer_name(peer));
  }
  const auto texts = net::get_texts(store, keys, who, timeout);
  std::map<int, FileDescriptor> connections;
  size_t callers = 0;
  for (size_t i = 0; i < texts.size(); ++i) {
    const int peer = place.peers[i];
    if (peer > place.rank) {
      ++callers;
      continue;
    }
    Listening theirs;
    std::istringstream(texts[i]) >> theirs.number >> theirs.port >> theirs.word;
    Hello hello;
    hello.rank = place.rank;
    std::copy_n(theirs.word.begin(), std::min(kWordBytes, theirs.word.size()), hello.word.begin());
    connections[peer] = call_peer(peer, theirs, hello, deadline);
  }
  while (callers > 0) {
    auto fd = listener.accept(std::min(deadline, std::chrono::steady_clock::now() + kSlice));
    WaitHook::call();
    Hello hello;
    if (fd && receive_all(fd.get(), hello, std::min(deadline, std::chrono::steady_clock::now() + kPatience)) &&
        std::equal(hello.word.begin(), hello.word.end(), word.begin()) && hello.rank > place.rank &&
        std::find(place.peers.begin(), place.peers.end(), hello.rank) != place.peers.end() &&
        connections.emplace(hello.rank, std::move(fd)).second) {
      --callers;
    }
    if (callers > 0 && std::chrono::steady_clock::now() >= deadline) {
      std::string missing;
      for (const int peer : place.peers) {
        if (peer > place.rank && !connections.contains(peer)) missing += ", " + tcp_peer_name(peer);
      }
      throw Timeout("waited " + std::to_string(timeout.count()) + " ms for connections of" + missing.substr(1) +
                    " to " + place.number + "; hosts of a job must reach one another on all ports");
    }
  }
  for (auto& [peer, fd] : connections) {
    const int on = 1;
    ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
  return connections;
}

}  // namespace muster::comm
