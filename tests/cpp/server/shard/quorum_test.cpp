#include "server/shard/quorum.h"

#include "cpp/catch.h"
#include "muster/error.h"

using namespace muster;
using namespace muster::server;
using std::chrono::milliseconds;

namespace {

const Quorum::Time kStart{};

Quorum::Time after(int ms) { return kStart + milliseconds(ms); }

Quorum make(uint32_t workers, uint32_t staleness) {
  Quorum quorum;
  quorum.configure({workers, staleness, milliseconds(100), milliseconds(1000)}, kStart);
  return quorum;
}

uint64_t add(Quorum& quorum, uint32_t rank, Quorum::Time now = kStart) {
  const uint64_t incarnation = quorum.greet(rank, 0, now);
  quorum.join(rank, incarnation, quorum.step_of_joiner(), now);
  return incarnation;
}

}  // namespace

TEST_CASE("a synchronous step goes on once every live member has committed", "[server]") {
  Quorum quorum = make(3, 0);
  const auto a = add(quorum, 0), b = add(quorum, 1);
  quorum.commit(0, a, {1, {1, 10}});
  quorum.commit(1, b, {1, {2, 20}});
  CHECK_FALSE(quorum.decision(0, 1));  // worker 2 is awaited
  CHECK(quorum.missing(0, 1) == "worker 2");
  const auto c = add(quorum, 2);
  quorum.commit(2, c, {1, {4, 40}});
  const auto decision = quorum.decision(1, 1);
  REQUIRE(decision);
  CHECK(decision->members == std::vector<uint32_t>{0, 1, 2});
  CHECK(decision->numbers == std::vector<double>{7, 70});
  quorum.commit(1, b, {1, {2, 20}});  // again
  CHECK(quorum.decision(1, 1) == decision);
  CHECK_THROWS_AS(quorum.commit(1, b, {0, {2, 20}}), InvalidArgument);
  quorum.commit(0, a, {2, {1, 10}});
  CHECK_THROWS_AS(quorum.commit(1, b, {2, {1}}), LayoutMismatch);
}

TEST_CASE("the silent leave the quorum, the rest go on", "[server]") {
  Quorum quorum = make(3, 0);
  const auto a = add(quorum, 0), b = add(quorum, 1);
  const auto c = add(quorum, 2);
  quorum.commit(0, a, {1, {1}});
  quorum.commit(2, c, {1, {4}});
  quorum.touch(0, a, after(90));
  quorum.touch(1, b, after(90));
  CHECK(quorum.expire(after(100)).empty());
  CHECK(quorum.expire(after(101)) == std::vector<uint32_t>{2});
  CHECK_THROWS_AS(quorum.touch(2, c, after(102)), Fenced);
  CHECK_FALSE(quorum.decision(0, 1));
  quorum.commit(1, b, {1, {2}});
  REQUIRE(quorum.decision(0, 1));
  CHECK(quorum.decision(0, 1)->members == std::vector<uint32_t>{0, 1});
  CHECK(quorum.decision(0, 1)->numbers == std::vector<double>{3});

  const auto again = add(quorum, 2, after(110));
  CHECK(again > c);
  CHECK(quorum.step_of_joiner() == 1);
  CHECK_FALSE(quorum.may_push(2, 1));
  CHECK(quorum.may_push(2, 2));
  quorum.leave(0, a);
  quorum.commit(1, b, {2, {2}});
  CHECK_FALSE(quorum.decision(1, 2));
  quorum.commit(2, again, {2, {5}});
  CHECK(quorum.decision(1, 2)->numbers == std::vector<double>{7});
}

TEST_CASE("a server that stood still takes nobody for silent", "[server]") {
  Quorum quorum = make(2, 0);
  const auto a = add(quorum, 0);
  add(quorum, 1);
  CHECK(quorum.expire(after(5'100), milliseconds(5'000)).empty());
  quorum.touch(0, a, after(5'101));
  CHECK(quorum.expire(after(5'101)) == std::vector<uint32_t>{1});  // it was silent before and after
  // A sign that was looked at first.
  quorum.touch(0, a, after(9'000));
  CHECK(quorum.expire(after(9'000), milliseconds(3'899)).empty());
  CHECK(quorum.expire(after(9'101)) == std::vector<uint32_t>{0});
}

TEST_CASE("who rests holds nobody back, and goes on beside the slowest", "[server]") {
  Quorum quorum = make(3, 1);
  const auto a = add(quorum, 0), b = add(quorum, 1), c = add(quorum, 2);
  quorum.note_rests(2, c, true);
  quorum.commit(0, a, {1, {}});
  quorum.commit(0, a, {2, {}});
  CHECK_FALSE(quorum.decision(0, 2));
  CHECK(quorum.missing(0, 2) == "worker 1");
  quorum.note_rests(1, b, true);
  CHECK(quorum.decision(0, 2));
  for (uint64_t step = 3; step <= 7; ++step) quorum.commit(0, a, {step, {}});
  CHECK(quorum.decision(0, 7));

  SECTION("with a batch") {
    quorum.note_rests(1, b, false);
    CHECK(quorum.progress(1).own == 7);
    quorum.note_rests(1, b, false);
    CHECK(quorum.progress(1).own == 7);
  }
  SECTION("with a step of its own") {
    quorum.commit(1, b, {1, {}});
    CHECK(quorum.progress(1).own == 8);
    CHECK(quorum.decision(1, 1));
  }
  const uint64_t reached = quorum.progress(1).own;
  quorum.commit(0, a, {reached + 1, {}});
  CHECK(quorum.decision(0, reached + 1));
  quorum.commit(0, a, {reached + 2, {}});
  CHECK_FALSE(quorum.decision(0, reached + 2));
  CHECK(quorum.missing(0, reached + 2) == "worker 1");

  Quorum again;
  again.configure({3, 1, milliseconds(100), milliseconds(1000)}, kStart);
  again.restore(quorum.record(), kStart);
  CHECK_FALSE(again.decision(0, reached + 2));
  CHECK(again.missing(0, reached + 2) == "worker 1");
  CHECK(again.progress(1).own == reached);
}

TEST_CASE("who was never seen is awaited for longer, but not for ever", "[server]") {
  Quorum quorum = make(2, 0);
  const auto a = add(quorum, 0);
  quorum.touch(0, a, after(950));
  CHECK(quorum.expire(after(1000)).empty());
  quorum.commit(0, a, {1, {}});
  CHECK_FALSE(quorum.decision(0, 1));
  CHECK(quorum.expire(after(1001)) == std::vector<uint32_t>{1});
  CHECK(quorum.decision(0, 1));
}

TEST_CASE("who came and never joined is awaited no longer than a member", "[server]") {
  Quorum quorum = make(2, 0);
  const auto a = quorum.greet(0, 0, kStart);
  CHECK(quorum.expire(after(100)).empty());
  CHECK_FALSE(quorum.is_gone(0));
  CHECK(quorum.expire(after(101)) == std::vector<uint32_t>{0});
  CHECK(quorum.is_gone(0));
  CHECK_FALSE(quorum.is_gone(1));
  CHECK_THROWS_AS(quorum.join(0, a, 0, after(102)), Fenced);

  quorum.greet(0, 0, after(103));
  CHECK_FALSE(quorum.is_gone(0));
  add(quorum, 1, after(103));
  quorum.begin_anew({2, 0, milliseconds(100), milliseconds(1000)}, after(104));
  CHECK_FALSE(quorum.is_gone(1));
  CHECK(quorum.expire(after(205)).empty());
  quorum.greet(1, 0, after(206));
  CHECK(quorum.expire(after(307)) == std::vector<uint32_t>{1});
}

TEST_CASE("a new incarnation fences the old one, whose commit is forgotten", "[server]") {
  Quorum quorum = make(2, 0);
  const auto a = add(quorum, 0), b = add(quorum, 1);
  quorum.commit(0, a, {1, {1}});
  const auto again = quorum.greet(0, 0, after(1));
  CHECK_THROWS_AS(quorum.commit(0, a, {1, {1}}), Fenced);
  CHECK_THROWS_AS(quorum.greet(0, a, after(1)), Fenced);
  quorum.join(0, again, quorum.step_of_joiner(), after(1));
  quorum.commit(1, b, {1, {2}});
  CHECK_FALSE(quorum.decision(1, 1));
  quorum.commit(0, again, {1, {8}});
  CHECK(quorum.decision(1, 1)->numbers == std::vector<double>{10});
}

TEST_CASE("a job that begins anew fences the one before and awaits all of its own", "[server]") {
  Quorum quorum = make(2, 0);
  const auto a = add(quorum, 0), b = add(quorum, 1);
  quorum.commit(0, a, {1, {1}});
  quorum.commit(1, b, {1, {2}});
  quorum.commit(1, b, {2, {2}});
  CHECK(quorum.is_member(1, b));
  const auto early = quorum.greet(0, 0, after(1));
  CHECK_FALSE(quorum.is_member(0, early));
  CHECK(quorum.begin_anew({3, 0, milliseconds(100), milliseconds(1000)}, after(1)) == std::vector<uint32_t>{1});
  CHECK_THROWS_AS(quorum.touch(1, b, after(1)), Fenced);
  CHECK_FALSE(quorum.is_member(1, b));
  CHECK(quorum.workers() == 3);
  CHECK(quorum.live() == std::vector<uint32_t>{0, 1, 2});
  quorum.join(0, early, quorum.step_of_joiner(), after(1));
  quorum.commit(0, early, {3, {4}});
  CHECK_FALSE(quorum.decision(0, 3));
  const auto c = add(quorum, 1, after(2)), d = add(quorum, 2, after(2));
  quorum.commit(1, c, {3, {8}});
  quorum.commit(2, d, {3, {16}});
  CHECK(quorum.decision(0, 3)->numbers == std::vector<double>{28});
}

TEST_CASE("nobody runs more than k steps ahead of the slowest live worker", "[server]") {
  Quorum quorum = make(2, 3);
  const auto a = add(quorum, 0), b = add(quorum, 1);
  for (uint64_t step = 1; step <= 3; ++step) {
    quorum.commit(0, a, {step, {}});
    CHECK(quorum.decision(0, step));
  }
  quorum.commit(0, a, {4, {}});
  CHECK_FALSE(quorum.decision(0, 4));
  quorum.commit(1, b, {1, {}});
  CHECK(quorum.decision(0, 4));
  quorum.commit(0, a, {5, {}});
  CHECK_FALSE(quorum.decision(0, 5));
  quorum.touch(0, a, after(200));
  CHECK(quorum.expire(after(200)) == std::vector<uint32_t>{1});
  CHECK(quorum.decision(0, 5));
  add(quorum, 1, after(200));
  CHECK(quorum.progress(0).slowest == 5);  // comes in beside the slowest

  Quorum any = make(2, kAnyStaleness);
  const auto alone = add(any, 0);
  any.commit(0, alone, {1000, {}});
  CHECK(any.decision(0, 1000));
}

TEST_CASE("members survive a snapshot, and tell what it forgot", "[server]") {
  Quorum quorum = make(2, 0);
  const auto a = add(quorum, 0), b = add(quorum, 1);
  quorum.commit(0, a, {1, {1}});
  quorum.commit(1, b, {1, {2}});
  const auto record = decode<Quorum::Record>(encode(quorum.record()));
  quorum.commit(0, a, {2, {3}});
  quorum.commit(1, b, {2, {4}});
  const auto second = *quorum.decision(0, 2);

  Quorum restored = make(2, 0);
  restored.restore(record, after(500));
  CHECK(restored.decision(0, 1)->numbers == std::vector<double>{3});
  restored.touch(0, a, after(500));
  restored.commit(1, b, {2, {4}});
  CHECK_FALSE(restored.decision(1, 2));
  restored.recall(second);
  CHECK(restored.decision(1, 2) == second);
  CHECK(restored.expire(after(601)) == std::vector<uint32_t>{0, 1});
}
