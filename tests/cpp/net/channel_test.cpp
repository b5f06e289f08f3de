#include "net/channel.h"

#include <sched.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <future>
#include <numeric>
#include <thread>
#include <vector>

#include "core/wait_hook.h"
#include "cpp/catch.h"
#include "cpp/net/deadlines.h"
#include "muster/error.h"
#include "support/memory_channel.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::net;

using testing::in;

namespace {

constexpr size_t kShared = size_t{64} << 20;

struct Ends {
  std::unique_ptr<Channel> caller;
  std::unique_ptr<Channel> callee;
  std::shared_ptr<Arena> memory;  // that the caller shares
};

// The channels that the suite runs on: ends that are connected.
struct OnHost {
  static constexpr const char* kName = "Unix socket";
  static Ends connect(const std::shared_ptr<Arena>& memory = nullptr) {
    const std::string name = "muster-test-" + random_name();
    const auto listener = listen_on_host(name);
    auto caller = connect_on_host(name, memory, in(5'000));
    auto callee = listener->accept(in(5'000));
    REQUIRE(callee);
    return {std::move(caller), std::move(callee), memory};
  }
};

struct OnHostSharing : OnHost {
  static constexpr const char* kName = "Unix socket with shared memory";
  static Ends connect() { return OnHost::connect(std::make_shared<Arena>(kShared)); }
};

struct InMemory {
  static constexpr const char* kName = "memory";
  static Ends connect() {
    auto ends = testing::connect_in_memory();
    return {std::move(ends.caller), std::move(ends.callee), nullptr};
  }
};

std::vector<std::byte> pattern(size_t bytes, int seed) {
  std::vector<std::byte> data(bytes);
  for (size_t i = 0; i < bytes; ++i)
    data[i] = static_cast<std::byte>((i * 2654435761U + static_cast<size_t>(seed)) >> 7);
  return data;
}

bool equal(Bytes a, Bytes b) { return std::equal(a.begin(), a.end(), b.begin(), b.end()); }

Frame receive(Channel& channel) {
  Frame frame;
  MUSTER_CHECK(channel.receive(frame, in(20'000)));
  return frame;
}

}  // namespace

TEMPLATE_TEST_CASE("frames arrive in order, whole, both ways", "[net]", OnHost, OnHostSharing, InMemory) {
  const Ends ends = TestType::connect();
  const auto large = pattern(5 << 20, 1);
  const auto small = pattern(100, 2);
  auto echo = std::async(std::launch::async, [&] {
    for (int i = 0; i < 20; ++i) {
      const Frame frame = receive(*ends.callee);
      const Bytes payload(frame.payload);
      ends.callee->send(static_cast<uint16_t>(frame.type + 1), frame.message, {&payload, 1}, in(20'000));
    }
  });
  for (int i = 0; i < 20; ++i) {
    const Bytes pieces[] = {small, {}, large};
    const std::string message = "message " + std::to_string(i);
    ends.caller->send(static_cast<uint16_t>(i + 1), message, std::span(pieces, i % 2 == 0 ? 3 : 1), in(20'000));
    const Frame frame = receive(*ends.caller);
    CHECK(frame.type == i + 2);
    CHECK(frame.message == message);
    REQUIRE(frame.payload.size() == (i % 2 == 0 ? small.size() + large.size() : small.size()));
    CHECK(equal(frame.payload.first(small.size()), small));
    if (i % 2 == 0) CHECK(equal(frame.payload.subspan(small.size()), large));
  }
  echo.get();
}

TEMPLATE_TEST_CASE("a message may be large, a payload goes where the receiver wants it", "[net]", OnHost, OnHostSharing,
                   InMemory) {
  const Ends ends = TestType::connect();
  const std::string message(3 << 20, 'm');
  const auto data = pattern(1 << 20, 3);
  auto sent = std::async(std::launch::async, [&] {
    const Bytes payload(data);
    ends.caller->send(7, message, {&payload, 1}, in(20'000));
  });
  std::vector<std::byte> home(data.size());
  Frame frame;
  REQUIRE(ends.callee->receive(frame, in(20'000), [&](uint16_t type, const std::string& text, uint64_t bytes) {
    return type == 7 && text.size() == message.size() && bytes == home.size() ? std::span(home)
                                                                              : std::span<std::byte>();
  }));
  sent.get();
  CHECK(frame.message == message);
  CHECK(frame.payload.data() == home.data());
  CHECK(equal(home, data));
}

TEMPLATE_TEST_CASE("a frame that is begun without waiting is ended later", "[net]", OnHost, OnHostSharing, InMemory) {
  const Ends ends = TestType::connect();
  // The last small frame finds no room for its header, a large one for a part of its payload.
  const size_t bytes = GENERATE(size_t{1000}, size_t{5} << 20);
  const std::string message = "message";
  const auto expected = pattern(bytes, 4);
  std::vector<std::byte> rest;
  int frames = 0;
  while (rest.empty()) {
    auto data = expected;
    const Bytes left = ends.caller->begin_send(9, message, data, std::chrono::milliseconds(frames % 2));
    rest.assign(left.begin(), left.end());
    std::fill(data.begin(), data.end(), std::byte{0});
    ++frames;
  }
  CHECK((bytes == 1000 ? rest.size() == bytes : rest.size() < bytes));
  auto read = std::async(std::launch::async, [&] {
    for (int i = 0; i < frames; ++i) {
      const Frame frame = receive(*ends.callee);
      MUSTER_CHECK(frame.type == 9 && frame.message == message && equal(frame.payload, expected));
    }
  });
  ends.caller->end_send(rest, in(20'000));
  read.get();
  ends.caller->end_send({}, in(0));
  ends.caller->send(3, "next", {}, in(1'000));
  CHECK(receive(*ends.callee).message == "next");
}

TEMPLATE_TEST_CASE("bounds, deadlines and the peer's end", "[net]", OnHost, OnHostSharing, InMemory) {
  Ends ends = TestType::connect();
  const std::vector<std::byte> much(FrameHeader::kMaxPayloadBytes + 1);
  const Bytes payload(much);
  CHECK_THROWS_AS(ends.caller->send(1, "", {&payload, 1}, in(1'000)), InvalidArgument);
  Frame frame;
  CHECK_FALSE(ends.caller->wait_input(in(20)));
  CHECK_THROWS_AS(ends.caller->receive(frame, in(20)), Timeout);
  const auto fill = [&] {
    for (int i = 0; i < 10'000; ++i) ends.caller->send(1, std::string(100'000, 'x'), {}, in(20));
  };
  CHECK_THROWS_AS(fill(), Timeout);

  ends = TestType::connect();
  ends.caller->send(1, "last", {}, in(1'000));
  CHECK(ends.callee->wait_input(in(5'000)));
  ends.caller.reset();
  CHECK(receive(*ends.callee).message == "last");
  CHECK_FALSE(ends.callee->receive(frame, in(5'000)));
  CHECK_THROWS_AS(ends.callee->send(1, "x", {}, in(1'000)), CommError);
}

TEMPLATE_TEST_CASE("nothing follows a frame that was cut", "[net]", OnHost, OnHostSharing) {
  const Ends ends = TestType::connect();
  const std::string large(size_t{5} << 20, 'x');
  SECTION("by its deadline") { CHECK_THROWS_AS(ends.caller->send(1, large, {}, in(20)), Timeout); }
  SECTION("since its end was not sent") {
    const std::vector<std::byte> payload(large.size());
    CHECK_FALSE(ends.caller->begin_send(1, "", payload, std::chrono::milliseconds(1)).empty());
  }
  auto read = std::async(std::launch::async, [&] {
    Frame frame;
    return ends.callee->receive(frame, in(500));
  });
  CHECK_THROWS_AS(ends.caller->send(2, "next", {}, in(5'000)), CommError);
  CHECK_THROWS_AS(read.get(), Timeout);
}

TEMPLATE_TEST_CASE("what the WaitHook throws ends a send to a peer that does not read", "[net]", OnHost, OnHostSharing,
                   InMemory) {
  const Ends ends = TestType::connect();
  int calls = 0;
  const WaitHook hook([&] {
    if (++calls == 3) throw std::runtime_error("interrupted");
  });
  const auto begin = std::chrono::steady_clock::now();
  const auto fill = [&] {
    for (;;) ends.caller->send(1, std::string(100'000, 'x'), {}, in(60'000));
  };
  CHECK_THROWS_AS(fill(), std::runtime_error);
  CHECK(calls == 3);
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10));
}

TEMPLATE_TEST_CASE("close wakes who waits", "[net]", OnHost, OnHostSharing, InMemory) {
  const Ends ends = TestType::connect();
  auto waiting = std::async(std::launch::async, [&] {
    Frame frame;
    return ends.callee->receive(frame, in(60'000));
  });
  ends.callee->close();
  CHECK_FALSE(waiting.get());
}

TEST_CASE("shared memory is read and written in place", "[net]") {
  const Ends ends = OnHostSharing::connect();
  std::byte* const mine = ends.memory->allocate(1 << 20);
  const auto data = pattern(1 << 20, 4);
  std::copy(data.begin(), data.end(), mine);
  const Bytes payload(mine + 64, 1000);
  ends.caller->send(1, "", {&payload, 1}, in(1'000));
  const Frame frame = receive(*ends.callee);
  CHECK(equal(frame.payload, payload));
  mine[64] = std::byte{0xab};
  CHECK(frame.payload[0] == std::byte{0xab});  // no copy

  const auto place = ends.caller->place_of(mine + 4096, 100);
  REQUIRE(place.has_value());
  std::byte* const theirs = ends.callee->reach(*place, 100);
  REQUIRE(theirs != nullptr);
  std::memset(theirs, 7, 100);
  const Bytes written(theirs, 100);
  ends.callee->send(2, "", {&written, 1}, in(1'000));
  CHECK(receive(*ends.caller).payload.data() == mine + 4096);

  CHECK(ends.callee->reach(kShared, 1) == nullptr);
  CHECK(ends.callee->reach(kShared - 1, ~uint64_t{0}) == nullptr);
  CHECK(ends.caller->reach(0, 1) == nullptr);
  CHECK_FALSE(ends.caller->place_of(data.data(), 1).has_value());
}

namespace {

// A peer that sends bytes of its own making.
struct RawPeer {
  explicit RawPeer() {
    const std::string name = "muster-test-" + random_name();
    const auto listener = listen_on_host(name);
    fd = connect_to(name, SOCK_STREAM);
    channel = listener->accept(in(5'000));
  }
  void send(const FrameHeader& header) const {
    const auto bytes = encode(header);
    MUSTER_CHECK(::send(fd.get(), bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  }
  void send(const std::string& bytes) const {
    MUSTER_CHECK(::send(fd.get(), bytes.data(), bytes.size(), 0) == static_cast<ssize_t>(bytes.size()));
  }
  FileDescriptor fd;
  std::unique_ptr<Channel> channel;
};

constexpr FrameHeader kAttach{.placement = Placement::in_sender};

}  // namespace

TEST_CASE("a connection that is cut in the middle of a frame", "[net]") {
  RawPeer peer;
  peer.send(kAttach);
  peer.send(FrameHeader{.type = 1, .message_bytes = 100});
  peer.send("half of it");
  peer.fd = FileDescriptor();
  Frame frame;
  CHECK_THROWS_AS(peer.channel->receive(frame, in(5'000)), CommError);
}

TEST_CASE("the deadline of accept holds while another user calls again and again", "[net]") {
  if (::geteuid() != 0) return;  // nobody else can be played
  const std::string name = "muster-test-" + random_name();
  const auto listener = listen_on_host(name);
  std::vector<pid_t> callers;
  for (int i = 0; i < 4; ++i) {
    callers.push_back(::fork());
    if (callers.back() != 0) continue;
    if (::setuid(65'534) != 0) ::_exit(1);
    for (;;) {
      try {
        connect_to(name, SOCK_STREAM);
      } catch (const std::exception&) {
        ::sched_yield();
      }
    }
  }
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 5; ++i) CHECK(listener->accept(in(20)) == nullptr);
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(3));
  for (const pid_t caller : callers) {
    ::kill(caller, SIGKILL);
    int status = 0;
    ::waitpid(caller, &status, 0);
    CHECK(WIFSIGNALED(status));
  }
}

TEST_CASE("descriptors that nobody asked for are closed, and end the connection", "[net]") {
  const auto count = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
  };
  const int num_sent = GENERATE(2, 5, 40);
  const auto before = count();
  {
    RawPeer peer;
    std::vector<int> sent(static_cast<size_t>(num_sent), peer.fd.get());
    std::vector<std::byte> control(CMSG_SPACE(sent.size() * sizeof(int)));
    auto header = net::encode(kAttach);
    iovec data{header.data(), header.size()};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const first = CMSG_FIRSTHDR(&message);
    first->cmsg_level = SOL_SOCKET;
    first->cmsg_type = SCM_RIGHTS;
    first->cmsg_len = CMSG_LEN(sent.size() * sizeof(int));
    std::memcpy(CMSG_DATA(first), sent.data(), sent.size() * sizeof(int));
    REQUIRE(::sendmsg(peer.fd.get(), &message, 0) == static_cast<ssize_t>(header.size()));
    const auto during = count();
    Frame frame;
    CHECK_THROWS_AS(peer.channel->receive(frame, in(5'000)), CommError);
    CHECK(count() <= during + 1);  // the memory that a peer may offer
  }
  CHECK(count() == before);
}

TEST_CASE("a connection that is cut in the middle of a header", "[net]") {
  RawPeer peer;
  peer.send(kAttach);
  peer.send(std::string("MSRF"));
  peer.fd = FileDescriptor();
  Frame frame;
  CHECK_THROWS_AS(peer.channel->receive(frame, in(5'000)), CommError);
}

TEST_CASE("what is no frame, or names memory that is not shared, ends the connection", "[net]") {
  Frame frame;
  const auto received_after = [&](const FrameHeader& first, const std::string& then) {
    const RawPeer peer;
    peer.send(first);
    peer.send(then);
    return peer.channel->receive(frame, in(5'000));
  };
  const std::string header(FrameHeader::kBytes, '\0');
  CHECK_THROWS_AS(received_after(kAttach, header), CommError);
  CHECK_THROWS_AS(received_after(FrameHeader{.type = 5}, header), CommError);  // no attach
  CHECK_THROWS_AS(received_after(FrameHeader{.placement = Placement::in_sender, .place = 4096}, header), CommError);
  const RawPeer peer;
  peer.send(kAttach);
  peer.send(FrameHeader{.type = 1, .placement = Placement::in_sender, .payload_bytes = 8, .place = 0});
  CHECK_THROWS_AS(peer.channel->receive(frame, in(5'000)), CommError);
}

TEST_CASE("a promise of many bytes takes no memory before they come", "[net]") {
  const std::string failures = testing::run_processes(1, [](int) {
    const RawPeer peer;
    peer.send(kAttach);
    peer.send(FrameHeader{.type = 1, .message_bytes = FrameHeader::kMaxMessageBytes});
    peer.send("a few");
    Frame frame;
    try {
      peer.channel->receive(frame, in(50));
    } catch (const Timeout&) {
      MUSTER_CHECK(frame.message.capacity() <= size_t{2} << 20);
      return;
    }
    MUSTER_CHECK(false);
  });
  CHECK(failures.empty());
}
