#include "net/unforked.h"

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <utility>

#include "cpp/catch.h"

namespace muster::net {
TEST_CASE("a descriptor that is not forked ends with its process's, whatever children live", "[net]") {
  std::array<int, 2> ends{};
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) == 0);
  const FileDescriptor peer(ends[1]);
  UnforkedDescriptor own([&] { return FileDescriptor(ends[0]); });
  UnforkedDescriptor moved = std::move(own);
  CHECK(!own);
  REQUIRE(moved.get() == ends[0]);
  std::array<int, 2> until{};
  REQUIRE(::pipe(until.data()) == 0);
  FileDescriptor lives_on(until[1]);
  const FileDescriptor waits(until[0]);
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::close(lives_on.get());
    char byte = 0;
    const bool is_empty = ::read(moved.get(), &byte, 1) == 0;
    moved = {};
    ::read(waits.get(), &byte, 1);
    ::_exit(is_empty ? 0 : 1);
  }
  REQUIRE(pid > 0);
  CHECK(::write(moved.get(), "x", 1) == 1);
  char byte = 0;
  CHECK(::read(peer.get(), &byte, 1) == 1);
  moved = {};
  CHECK(::read(peer.get(), &byte, 1) == 0);  // the end, although the child lives
  lives_on = {};
  int status = 0;
  REQUIRE(::waitpid(pid, &status, 0) == pid);
  CHECK(status == 0);
}

TEST_CASE("what could not be opened is empty", "[net]") {
  const UnforkedDescriptor nothing([] { return FileDescriptor(); });
  CHECK(!nothing);
}

}  // namespace muster::net
