#include "comm/hosts/tcp_meeting.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "core/plain_text.h"
#include "core/wait_hook.h"
#include "muster/error.h"
#include "net/rendezvous.h"
#include "net/tcp.h"

namespace muster::comm {
namespace {

using net::Deadline;
using net::FileDescriptor;

constexpr size_t kWordBytes = 32;                     // of net::random_name
constexpr std::chrono::milliseconds kLookAround{50};  // between calls of the WaitHook
constexpr std::chrono::milliseconds kBetweenCalls{20};
constexpr std::chrono::seconds kPatience{1};  // with a stranger who says nothing

// What a peer says first.
struct Hello {
  std::array<char, kWordBytes> word{};
  int32_t rank = 0;
};

// Where a rank listens, and the word by which it knows its peers.
struct Listening {
  std::string address;
  std::string port;
  std::string word;
};

// What a rank answers to a peer's hello.
constexpr char kWelcome = '!';

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

// Sends all of a hello, on a socket that does not block, and waits for the answer. False at the deadline, and where the
// connection ends.
bool is_welcome(int fd, const Hello& hello, Deadline deadline) {
  if (!send_all(fd, hello, deadline)) return false;
  while (std::chrono::steady_clock::now() < deadline) {
    char answer = 0;
    const ssize_t n = ::recv(fd, &answer, 1, 0);
    if (n >= 0) return n == 1 && answer == kWelcome;
    if (errno != EAGAIN && errno != EINTR) return false;
    net::wait_readable({fd}, std::min(deadline, std::chrono::steady_clock::now() + kLookAround));
    WaitHook::call();
  }
  return false;
}

FileDescriptor call_peer(int peer, const Listening& theirs, const Hello& hello, Deadline deadline) {
  std::string why = "it takes no connection";
  const auto addresses = net::resolve({theirs.address, theirs.port}, why);
  while (addresses) {
    int error = 0;
    auto fd = net::try_to_connect(*addresses, deadline, error, WaitHook::call);
    if (fd && is_welcome(fd.get(), hello, deadline)) return fd;
    if (!fd) why = std::strerror(error);
    if (std::chrono::steady_clock::now() >= deadline) break;
    std::this_thread::sleep_for(kBetweenCalls);
  }
  throw CommError(tcp_peer_name(peer) + " cannot be reached at " + theirs.address + ", port " + theirs.port + ": " +
                  why + "; hosts of a job must reach one another on all ports");
}

// The peers that have yet to call this rank.
std::vector<int> missing_callers(const TcpPlace& place, const std::map<int, FileDescriptor>& connections) {
  std::vector<int> missing;
  for (const int peer : place.peers) {
    if (peer > place.rank && !connections.contains(peer)) missing.push_back(peer);
  }
  return missing;
}

// Whether a connection is of a peer that is waited for, whose number is then in `hello`.
bool is_of_peer(int fd, const TcpPlace& place, const std::string& word, Hello& hello, Deadline deadline) {
  return receive_all(fd, hello, deadline) && std::equal(hello.word.begin(), hello.word.end(), word.begin()) &&
         hello.rank > place.rank &&
         std::find(place.peers.begin(), place.peers.end(), hello.rank) != place.peers.end() &&
         ::send(fd, &kWelcome, 1, MSG_NOSIGNAL) == 1;
}

}  // namespace

std::string tcp_peer_name(int rank) { return "worker " + std::to_string(rank); }

std::map<int, FileDescriptor> meet_over_tcp(c10d::Store& store, const TcpPlace& place, Milliseconds timeout) {
  if (place.peers.empty()) return {};
  const net::TcpListener listener(place.address);
  const std::string word = net::random_name();
  net::set_text(store, key_of(place.rank), place.address + " " + std::to_string(listener.port()) + " " + word);

  std::vector<std::string> keys;
  std::vector<std::string> who;
  for (const int peer : place.peers) {
    keys.push_back(key_of(peer));
    who.push_back(tcp_peer_name(peer));
  }
  const auto texts = net::get_texts(store, keys, who, timeout);
  const Deadline deadline = std::chrono::steady_clock::now() + timeout;  // once all are there
  std::map<int, FileDescriptor> connections;
  for (size_t i = 0; i < texts.size(); ++i) {
    const int peer = place.peers[i];
    if (peer > place.rank) continue;
    Listening theirs;
    TextReader(texts[i]) >> theirs.address >> theirs.port >> theirs.word;
    Hello hello;
    hello.rank = place.rank;
    std::copy_n(theirs.word.begin(), std::min(kWordBytes, theirs.word.size()), hello.word.begin());
    connections[peer] = call_peer(peer, theirs, hello, deadline);
  }
  for (auto missing = missing_callers(place, connections); !missing.empty();) {
    auto fd = listener.accept(std::min(deadline, std::chrono::steady_clock::now() + kLookAround));
    WaitHook::call();
    Hello hello;
    const Deadline patience = std::min(deadline, std::chrono::steady_clock::now() + kPatience);
    if (fd && is_of_peer(fd.get(), place, word, hello, patience)) {
      connections[hello.rank] = std::move(fd);  // the last one, of a peer that calls again
      missing = missing_callers(place, connections);
    }
    if (!missing.empty() && std::chrono::steady_clock::now() >= deadline) {
      std::string names;
      for (const int peer : missing) names += ", " + tcp_peer_name(peer);
      throw Timeout("waited " + std::to_string(timeout.count()) + " ms for connections of" + names.substr(1) + " to " +
                    place.address + "; hosts of a job must reach one another on all ports");
    }
  }
  for (auto& [peer, fd] : connections) {
    const int on = 1;
    ::setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
  return connections;
}

}  // namespace muster::comm
