#include "server/worker/link.h"

#include <memory>
#include <string>

#include "core/wait_hook.h"
#include "cpp/catch.h"
#include "muster/error.h"
#include "server/worker/client.h"
#include "support/run_ranks.h"
#include "support/servers.h"
#include "support/virtual_time.h"

using namespace muster;
using namespace muster::server;
using std::chrono::milliseconds;
using testing::VirtualTime;

namespace {

constexpr milliseconds kHeartbeat{5'000};

// A server that welcomes, beats, and answers other requests when it is told to.
struct Room {
  Room() {
    time->listen("server", [this](net::Channel& channel, const net::Frame& frame) {
      const auto answer = [&](const auto& message) {
        channel.send(std::decay_t<decltype(message)>::kType, encode(message), {}, time->now());
      };
      if (is_silent) return;
      if (frame.type == Hello::kType) return answer(Welcome{7, 42});
      if (frame.type == Beat::kType) {
        ++beats;
        return answer(Beaten{{5, 5}, {}, 0});
      }
      if (answers) answer(Done{});
    });
  }

  Link::Config config() const { return {"server", 1, 2, kHeartbeat, time}; }

  std::shared_ptr<VirtualTime> time = std::make_shared<VirtualTime>();
  bool is_silent = false;
  bool answers = true;
  int beats = 0;
};

}  // namespace

TEST_CASE("a link lives as long as its server gives signs of life", "[server]") {
  Room room;
  Link link(room.config());
  CHECK(link.connect(0, nullptr, WaitHook::call) == 42);
  CHECK(link.life() == 7);
  link.keep_alive();
  link.send(Start{});
  link.receive<Done>([] {});

  room.answers = false;
  link.send(Start{});
  int calls = 0;
  const auto wait_for = [&](milliseconds duration) {
    calls = 0;
    const auto until = room.time->now() + duration;
    link.receive<Done>([&] {
      ++calls;
      if (room.time->now() >= until) throw std::runtime_error("enough");
    });
  };
  SECTION("it waits for an answer longer than the heartbeat's time") {
    CHECK_THROWS_WITH(wait_for(kHeartbeat * 20), "enough");
    CHECK(calls == 20 * kHeartbeat / milliseconds(50));
    CHECK(room.beats >= 20 * kHeartbeat / milliseconds(550));
    CHECK(link.durable().newest == 5);
    CHECK(link.is_broken());  // by what was thrown
  }
  SECTION("silence breaks it, and it says why") {
    const auto begin = room.time->passed();
    room.is_silent = true;
    const auto message = testing::message_of<LinkBroken>([&] { wait_for(kHeartbeat * 20); });
    CHECK(testing::contains(message, "no answer within the heartbeat's time"));
    CHECK(room.time->passed() - begin >= kHeartbeat);
    CHECK(room.time->passed() - begin <= kHeartbeat + milliseconds(600));
    CHECK(link.is_broken());
    room.is_silent = false;
    room.answers = true;
    CHECK(link.connect(42, nullptr, WaitHook::call) == 42);
    link.send(Start{});
    link.receive<Done>([] {});
    room.time->sleep(kHeartbeat * 3);
    CHECK_FALSE(link.is_broken());
  }
  SECTION("the server's end breaks it") {
    const auto begin = room.time->passed();
    room.time->end("server");
    CHECK_THROWS_AS(wait_for(kHeartbeat), LinkBroken);
    CHECK(room.time->passed() - begin <= milliseconds(60));
  }
}

TEST_CASE("an answer is not awaited on a connection that was made anew meanwhile", "[server]") {
  Room room;
  Link link(room.config());
  link.connect(0, nullptr, WaitHook::call);
  room.answers = false;
  const auto connect_again = [&] { link.connect(42, nullptr, WaitHook::call); };
  SECTION("of requests one by one") {
    link.send(Start{});
    CHECK_THROWS_AS(link.receive<Done>(connect_again), LinkBroken);
  }
  SECTION("of chunks") {
    const auto answered = [](const net::Frame&) { FAIL("of the connection before"); };
    link.send_chunk(0, Start::kType, encode(Start{}), {}, {}, answered, WaitHook::call);
    CHECK_THROWS_AS(link.drain(connect_again), LinkBroken);
    CHECK(link.under_way() == 0);
  }
  CHECK_FALSE(link.is_broken());
  room.answers = true;
  link.send(Start{});
  link.receive<Done>([] {});
}

TEST_CASE("a WaitHook is called while nobody says how a job stands", "[server]") {
  Room room;
  room.is_silent = true;
  int calls = 0;
  const WaitHook hook([&] { ++calls; });
  CHECK(inquire("server", milliseconds(1'000), *room.time) == std::nullopt);
  CHECK(calls >= room.time->passed() / milliseconds(100));
}

TEST_CASE("a server that does not greet breaks a link's connect after the heartbeat's time", "[server]") {
  Room room;
  room.is_silent = true;
  Link link(room.config());
  int calls = 0;
  const WaitHook hook([&] { ++calls; });
  CHECK_THROWS_AS(link.connect(0, nullptr, WaitHook::call), LinkBroken);
  CHECK(room.time->passed() == kHeartbeat);
  CHECK(calls >= 90);
}

TEST_CASE("what a WaitHook throws ends the wait for a server that does not read, and breaks the link", "[server]") {
  Room room;
  Link link(room.config());
  link.connect(0, nullptr, WaitHook::call);
  room.time->listen("server", nullptr);
  int calls = 0;
  const WaitHook hook([&] {
    if (++calls == 4) throw std::runtime_error("interrupted");
  });
  const std::vector<std::byte> much(size_t{1} << 20);
  const net::Bytes payload(much);
  CHECK_THROWS_WITH(link.send(Done{}, {&payload, 1}), "interrupted");
  CHECK(room.time->passed() == milliseconds(200));
  CHECK(link.is_broken());
}

TEST_CASE("patience is counted in the time of the surroundings", "[server]") {
  const auto time = std::make_shared<VirtualTime>();
  const Plan plan = testing::small_plan(1, 1, std::vector<kernels::SgdGroup>(2));
  auto config = testing::config_of({"server"}, 0, plan, /*shares_memory=*/false);
  config.surroundings = time;
  config.patience = std::chrono::minutes(5);
  const auto begin = std::chrono::steady_clock::now();
  CHECK_THROWS_AS(ServerClient(config), PeerLost);
  CHECK(time->passed() >= config.patience);
  CHECK(time->passed() <= config.patience + milliseconds(100));
  CHECK(inquire("server", config.patience, *time) == std::nullopt);
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::minutes(1));
}
