#include "net/unix_socket.h"

#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <limits>
#include <thread>

#include "cpp/catch.h"
#include "cpp/net/deadlines.h"
#include "muster/error.h"

using namespace muster;
using namespace muster::net;

using testing::in;

namespace {

struct Pair {
  UnixSocket caller;
  UnixSocket callee;
};

Pair make_pair_of_sockets() {
  const std::string name = "muster-test-" + random_name();
  const UnixListener listener(name);
  UnixSocket caller = UnixSocket::connect(name);
  std::optional<UnixSocket> callee = listener.accept(in(5'000));
  REQUIRE(callee.has_value());
  return {std::move(caller), std::move(*callee)};
}

}  // namespace

TEST_CASE("messages keep their boundaries and carry descriptors", "[net]") {
  const Pair pair = make_pair_of_sockets();
  CHECK(pair.caller.credentials().pid == ::getpid());
  CHECK(pair.callee.credentials().uid == ::geteuid());

  const FileDescriptor memory(::memfd_create("test", 0));
  REQUIRE(::write(memory.get(), "hello", 5) == 5);
  pair.caller.send("first", {memory.get(), memory.get()}, in(1'000));
  pair.caller.send("second", {}, in(1'000));

  Message message;
  REQUIRE(wait_readable({pair.callee.get()}, in(5'000)));
  REQUIRE(pair.callee.receive(message) == UnixSocket::Status::message);
  CHECK(message.bytes == "first");
  REQUIRE(message.descriptors.size() == 2);
  char text[5];
  CHECK(::pread(message.descriptors[1].get(), text, 5, 0) == 5);
  CHECK(std::memcmp(text, "hello", 5) == 0);
  REQUIRE(pair.callee.receive(message) == UnixSocket::Status::message);
  CHECK(message.bytes == "second");
  CHECK(message.descriptors.empty());
  CHECK(pair.callee.receive(message) == UnixSocket::Status::nothing);
}

TEST_CASE("the end of a peer is seen, and sending to it is an error", "[net]") {
  Pair pair = make_pair_of_sockets();
  pair.caller = UnixSocket();
  Message message;
  REQUIRE(wait_readable({pair.callee.get()}, in(5'000)));
  CHECK(pair.callee.receive(message) == UnixSocket::Status::end);
  CHECK_THROWS_AS(pair.callee.send("x", {}, in(1'000)), PeerGone);
}

TEST_CASE("a call waits for its place where more call than may queue", "[net]") {
  const std::string name = "muster-test-" + random_name();
  const FileDescriptor listener = listen_at(name, SOCK_SEQPACKET);
  REQUIRE(::listen(listener.get(), 0) == 0);  // as a system that cuts queues
  const UnixSocket first = UnixSocket::connect(name);
  CHECK_THROWS_AS(UnixSocket::connect(name), CommError);
  std::thread accepting([&] {
    for (int i = 0; i < 2; ++i) accept_from(listener, in(5'000));
  });
  CHECK_NOTHROW(UnixSocket::connect(name, in(5'000)));
  accepting.join();
}

TEST_CASE("deadlines: nobody calls, nobody reads", "[net]") {
  const UnixListener listener("muster-test-" + random_name());
  CHECK_FALSE(listener.accept(in(20)).has_value());
  CHECK_THROWS_AS(UnixSocket::connect("muster-test-" + random_name()), CommError);
  const Pair pair = make_pair_of_sockets();
  const auto fill = [&] {
    for (int i = 0; i < 10'000; ++i) pair.caller.send(std::string(UnixSocket::kMaxBytes, 'x'), {}, in(20));
  };
  CHECK_THROWS_AS(fill(), Timeout);
  CHECK_THROWS_AS(pair.caller.send(std::string(UnixSocket::kMaxBytes + 1, 'x'), {}, in(20)), InvalidArgument);
}

TEST_CASE("a wait lasts as long as its deadline says", "[net]") {
  CHECK(remaining_ms(std::chrono::steady_clock::now() + std::chrono::hours(2)) > 7'000'000);
  CHECK(remaining_ms(std::chrono::steady_clock::time_point::max()) == std::numeric_limits<int>::max());
  CHECK(remaining_ms(std::chrono::steady_clock::time_point::min()) == 0);
}

TEST_CASE("names are long and differ", "[net]") {
  CHECK(random_name().size() == 32);
  CHECK(random_name() != random_name());
  CHECK(host_identity() == host_identity());
}
