#include "server/worker/pulse.h"

#include <memory>
#include <string>
#include <vector>

#include "cpp/catch.h"
#include "muster/error.h"
#include "server/protocol/protocol.h"
#include "support/virtual_time.h"

using namespace muster;
using namespace muster::server;
using std::chrono::milliseconds;
using testing::VirtualTime;

namespace {

constexpr milliseconds kBeat{5'000};

struct BeatingOnce {
  explicit BeatingOnce(bool listens = true, milliseconds heartbeat = kBeat)
      : pulse({"server", 3, heartbeat}, *time, [this](const std::string& why) {
          ends.push_back(why);
          ended = time->passed();
        }) {
    pulse.note_welcome(42);
    if (listens) listen();
    time->start(pulse);
  }
  ~BeatingOnce() { time->stop(pulse); }

  void listen() {
    time->listen("server", [this](net::Channel& channel, const net::Frame& frame) { serve(channel, frame); });
  }
  void serve(net::Channel& channel, const net::Frame& frame) {
    if (is_silent) return;
    std::string answer;
    uint16_t type = Refusal::kType;
    if (frame.type == Hello::kType) {
      const auto hello = decode<Hello>(frame.message);
      CHECK(hello.rank == 3);
      CHECK(hello.incarnation == 42);
      ++greetings;
      type = refuses_hello ? Refusal::kType : Welcome::kType;
      answer = refuses_hello ? encode(Refusal{Refusal::Kind::fenced, "no"}) : encode(Welcome{7, 42});
    } else {
      ++beats;
      wishes += decode<Beat>(frame.message).wants_snapshot ? 1 : 0;
      type = refuses_beats ? Refusal::kType : Beaten::kType;
      answer = refuses_beats ? encode(Refusal{Refusal::Kind::other, "no"}) : encode(Beaten{{durable, durable}, {}, 0});
    }
    channel.send(type, answer, {}, time->now());
  }

  std::shared_ptr<VirtualTime> time = std::make_shared<VirtualTime>();
  bool is_silent = false;
  bool refuses_hello = false;
  bool refuses_beats = false;
  uint64_t durable = 0;
  int greetings = 0;
  int beats = 0;
  int wishes = 0;
  std::vector<std::string> ends;
  milliseconds ended{0};
  Pulse pulse;
};

}  // namespace

TEST_CASE("a pulse beats at once, and then at a fifth of the heartbeat's time", "[server]") {
  const auto heartbeat = GENERATE(milliseconds(5'000), milliseconds(1'000), milliseconds(100));
  BeatingOnce beating(true, heartbeat);
  beating.time->sleep(milliseconds(1));
  CHECK(beating.greetings == 1);
  CHECK(beating.beats == 1);
  const auto interval = std::min(heartbeat / 5, milliseconds(500));
  beating.time->sleep(interval * 10);
  CHECK(beating.beats == 11);
  CHECK(beating.greetings == 1);
  CHECK(beating.ends.empty());
}

TEST_CASE("a pulse knows what is durable, and passes on the wish for a snapshot", "[server]") {
  BeatingOnce beating;
  beating.time->sleep(milliseconds(600));
  CHECK(beating.wishes == 0);
  beating.durable = 9;
  beating.pulse.want_snapshot();
  beating.time->sleep(milliseconds(51));
  CHECK(beating.wishes == 1);
  CHECK(beating.pulse.durable().newest == 9);
  beating.durable = 8;
  beating.time->sleep(milliseconds(600));
  CHECK(beating.wishes == 1);
  CHECK(beating.pulse.durable().newest == 9);
}

TEST_CASE("a server that gives no answer for the heartbeat's time is silent, not before", "[server]") {
  BeatingOnce beating;
  beating.time->sleep(milliseconds(2'000));
  beating.is_silent = true;
  const auto begin = beating.time->passed();
  const auto unanswered = [&] { return beating.ended - begin; };
  beating.time->sleep(kBeat - milliseconds(1));
  CHECK(beating.ends.empty());
  beating.time->sleep(milliseconds(502));
  REQUIRE(beating.ends.size() >= 1);
  CHECK(unanswered() >= kBeat);
  CHECK(unanswered() <= kBeat + milliseconds(500));

  beating.is_silent = false;
  beating.time->sleep(kBeat);
  const auto ends = beating.ends.size();
  CHECK(beating.greetings == 2);
  beating.time->sleep(kBeat * 3);
  CHECK(beating.ends.size() == ends);
}

TEST_CASE("a server that accepts and never greets is silent after the heartbeat's time", "[server]") {
  BeatingOnce beating;
  beating.is_silent = true;
  beating.time->sleep(kBeat - milliseconds(1));
  CHECK(beating.ends.empty());
  beating.time->sleep(milliseconds(1));
  CHECK(beating.ends.size() == 1);
}

TEST_CASE("a server that cannot be reached is silent after the heartbeat's time, and a welcome counts", "[server]") {
  BeatingOnce beating(/*listens=*/false);
  beating.time->sleep(milliseconds(4'000));
  beating.pulse.note_welcome(42);
  beating.time->sleep(milliseconds(4'900));
  CHECK(beating.ends.empty());
  beating.time->sleep(milliseconds(200));
  CHECK_FALSE(beating.ends.empty());
}

TEST_CASE("a connection that ends is the server's end at once, and made again", "[server]") {
  BeatingOnce beating;
  beating.time->sleep(milliseconds(1'100));
  beating.time->end("server");
  beating.time->sleep(milliseconds(60));
  CHECK(beating.ends.size() == 1);
  beating.listen();
  beating.time->sleep(milliseconds(60));
  CHECK(beating.greetings == 2);
  CHECK(beating.ends.size() == 1);
}

TEST_CASE("a refused greeting is no sign of life, a refused beat is one", "[server]") {
  BeatingOnce beating;
  beating.refuses_hello = GENERATE(false, true);
  beating.refuses_beats = !beating.refuses_hello;
  beating.time->sleep(kBeat - milliseconds(100));
  CHECK(beating.ends.empty());
  beating.time->sleep(milliseconds(200));
  CHECK(beating.ends.empty() == beating.refuses_beats);
}

TEST_CASE("who stood still takes the answers that came meanwhile before it looks at the clock", "[server]") {
  const auto time = std::make_shared<VirtualTime>();
  int ends = 0;
  Pulse pulse({"server", 0, kBeat}, *time, [&](const std::string&) { ++ends; });
  pulse.note_welcome(1);
  time->listen("server", [&](net::Channel& channel, const net::Frame& frame) {
    if (frame.type == Hello::kType) return channel.send(Welcome::kType, encode(Welcome{7, 1}), {}, time->now());
    channel.send(Beaten::kType, encode(Beaten{}), {}, time->now());
  });
  for (int i = 0; i < 10; ++i) {
    pulse.tick(time->now());
    time->sleep(kBeat * 2);
  }
  CHECK(ends == 0);
}
