#include "server/shard/quorum.h"

#include "cpp/catch.h"
#include "muster/error.h"

using namespace muster;
using namespace muster::server;
using std::chrono::milliseconds;

namespace {

const Quorum::Time kStart{};

Quorum::Time at_ms(int ms) { return kStart + milliseconds(ms); }

Quorum::Rules rules(uint32_t workers, uint32_t staleness) {
  return {{workers, milliseconds(100), milliseconds(1000)}, staleness, milliseconds(1'000'000)};
}

Quorum make(uint32_t workers, uint32_t staleness) {
  Quorum quorum;
  quorum.configure(rules(workers, staleness), kStart);
  return quorum;
}

// Of step `step`, as `rank` (incarnation `incarnation`).
void commit(Quorum& quorum, uint32_t rank, uint64_t incarnation, uint64_t step, std::vector<double> numbers,
            Quorum::Time now = kStart) {
  quorum.commit(rank, incarnation, {step, std::move(numbers)}, now);
}

uint64_t add(Quorum& quorum, uint32_t rank, Quorum::Time now = kStart) {
  const uint64_t incarnation = quorum.greet(rank, 0, 0, now);
  quorum.join(rank, incarnation, quorum.step_of_joiner(), now);
  return incarnation;
}

}  // namespace

TEST_CASE("a synchronous step goes on once every live member has committed", "[server]") {
  Quorum quorum = make(3, 0);
  const auto a = add(quorum, 0), b = add(quorum, 1);
  commit(quorum, 0, a, 1, {1, 10});
  commit(quorum, 1, b, 1, {2, 20});
  CHECK_FALSE(quorum.decision(0, 1));  // worker 2 is awaited
  CHECK(quorum.missing(0, 1) == "worker 2");
  const auto c = add(quorum, 2);
  commit(quorum, 2, c, 1, {4, 40});
  const auto decision = quorum.decision(1, 1);
  REQUIRE(decision);
  CHECK(decision->members == std::vector<uint32_t>{0, 1, 2});
  CHECK(decision->numbers == std::vector<double>{7, 70});
  commit(quorum, 1, b, 1, {2, 20});  // again
  CHECK(*quorum.decision(1, 1) == *decision);
  CHECK_THROWS_AS(commit(quorum, 1, b, 0, {2, 20}), InvalidArgument);
  commit(quorum, 0, a, 2, {1, 10});
  CHECK_THROWS_AS(commit(quorum, 1, b, 2, {1}), LayoutMismatch);
}

TEST_CASE("a job that goes on awaits all of its own after a restart, where nobody had come yet", "[server]") {
  Quorum quorum = make(2, 0);
  quorum.begin_at(5);
  Quorum again = make(2, 0);
  again.restore(quorum.record(), kStart);
  const auto a = add(again, 0);
  commit(again, 0, a, 6, {1}, at_ms(101));
  CHECK_FALSE(again.decision(0, 6));
  CHECK(again.missing(0, 6) == "worker 1");
  const auto b = add(again, 1, at_ms(101));
  commit(again, 1, b, 6, {2}, at_ms(101));
  REQUIRE(again.decision(0, 6));
  CHECK(again.decision(0, 6)->members == std::vector<uint32_t>{0, 1});
}

TEST_CASE("a decision has each record once, and says whose it is", "[server]") {
  Quorum quorum = make(3, 0);
  const std::string shown[] = {"a", "b", "a"};
  for (uint32_t rank = 0; rank < 3; ++rank) {
    const auto incarnation = add(quorum, rank);
    quorum.commit(rank, incarnation, {1, {1}, shown[rank], 0, false}, kStart);
  }
  const auto decision = quorum.decision(0, 1);
  REQUIRE(decision);
  CHECK(decision->records == std::vector<std::string>{"a", "b"});
  for (uint32_t rank = 0; rank < 3; ++rank) CHECK(decision->record(rank) == shown[rank]);
  CHECK_THROWS_AS(decision->record(3), CommError);
  Decision wrong = *decision;
  wrong.record_of[1] = 2;
  CHECK_THROWS_AS(wrong.record(1), CommError);
}

TEST_CASE("the silent leave the quorum, the rest go on", "[server]") {
  Quorum quorum = make(3, 0);
  const auto a = add(quorum, 0), b = add(quorum, 1);
  const auto c = add(quorum, 2);
  commit(quorum, 0, a, 1, {1});
  commit(quorum, 2, c, 1, {4});
  quorum.members().touch(0, a, at_ms(90));
  quorum.members().touch(1, b, at_ms(90));
  CHECK(quorum.expire(at_ms(100)).empty());
  CHECK(quorum.expire(at_ms(101)) == std::vector<uint32_t>{2});
  CHECK_THROWS_AS(quorum.members().touch(2, c, at_ms(102)), Fenced);
  CHECK_FALSE(quorum.decision(0, 1));
  commit(quorum, 1, b, 1, {2});
  REQUIRE(quorum.decision(0, 1));
  CHECK(quorum.decision(0, 1)->members == std::vector<uint32_t>{0, 1});
  CHECK(quorum.decision(0, 1)->numbers == std::vector<double>{3});

  const auto again = add(quorum, 2, at_ms(110));
  CHECK(again > c);
  CHECK(quorum.step_of_joiner() == 1);
  CHECK_FALSE(quorum.members().may_push(2, 1, at_ms(110)));
  CHECK(quorum.members().may_push(2, 2, at_ms(110)));
  quorum.leave(0, a, at_ms(110));
  commit(quorum, 1, b, 2, {2});
  CHECK_FALSE(quorum.decision(1, 2));
  commit(quorum, 2, again, 2, {5});
  CHECK(quorum.decision(1, 2)->numbers == std::vector<double>{7});
}

TEST_CASE("a server that stood still takes nobody for silent", "[server]") {
  Quorum quorum = make(2, 0);
  const auto a = add(quorum, 0);
  add(quorum, 1);
  CHECK(quorum.expire(at_ms(5'100), milliseconds(5'000)).empty());
  quorum.members().touch(0, a, at_ms(5'101));
  CHECK(quorum.expire(at_ms(5'101)) == std::vector<uint32_t>{1});  // it was silent before and after
  // A sign that was looked at first.
  quorum.members().touch(0, a, at_ms(9'000));
  CHECK(quorum.expire(at_ms(9'000), milliseconds(3'899)).empty());
  CHECK(quorum.expire(at_ms(9'101)) == std::vector<uint32_t>{0});
}

TEST_CASE("who rests holds nobody back, and goes on beside the slowest", "[server]") {
  Quorum quorum = make(3, 1);
  const auto a = add(quorum, 0), b = add(quorum, 1), c = add(quorum, 2);
  quorum.note_rests(2, c, true);
  commit(quorum, 0, a, 1, {});
  commit(quorum, 0, a, 2, {});
  CHECK_FALSE(quorum.decision(0, 2));
  CHECK(quorum.missing(0, 2) == "worker 1");
  quorum.note_rests(1, b, true);
  CHECK(quorum.decision(0, 2));
  for (uint64_t step = 3; step <= 7; ++step) commit(quorum, 0, a, step, {});
  CHECK(quorum.decision(0, 7));

  SECTION("with a batch") {
    quorum.note_rests(1, b, false);
    CHECK(quorum.progress(1).own == 7);
    quorum.note_rests(1, b, false);
    CHECK(quorum.progress(1).own == 7);
  }
  SECTION("with a step of its own") {
    commit(quorum, 1, b, 1, {});
    CHECK(quorum.progress(1).own == 8);
    CHECK(quorum.decision(1, 1));
  }
  const uint64_t reached = quorum.progress(1).own;
  commit(quorum, 0, a, reached + 1, {});
  CHECK(quorum.decision(0, reached + 1));
  commit(quorum, 0, a, reached + 2, {});
  CHECK_FALSE(quorum.decision(0, reached + 2));
  CHECK(quorum.missing(0, reached + 2) == "worker 1");

  Quorum again;
  again.configure(rules(3, 1), kStart);
  again.restore(quorum.record(), kStart);
  CHECK_FALSE(again.decision(0, reached + 2));
  CHECK(again.missing(0, reached + 2) == "worker 1");
  CHECK(again.progress(1).own == reached);
}

TEST_CASE("who was never seen is awaited for longer, but not for ever", "[server]") {
  Quorum quorum = make(2, 0);
  const auto a = add(quorum, 0);
  quorum.members().touch(0, a, at_ms(950));
  CHECK(quorum.expire(at_ms(1000)).empty());
  commit(quorum, 0, a, 1, {});
  CHECK_FALSE(quorum.decision(0, 1));
  CHECK(quorum.expire(at_ms(1001)) == std::vector<uint32_t>{1});
  CHECK(quorum.decision(0, 1));
}

TEST_CASE("who came and never joined is awaited no longer than a member", "[server]") {
  Quorum quorum = make(2, 0);
  const auto a = quorum.greet(0, 0, 0, kStart);
  CHECK(quorum.expire(at_ms(100)).empty());
  CHECK_FALSE(quorum.members().is_gone(0));
  CHECK(quorum.expire(at_ms(101)) == std::vector<uint32_t>{0});
  CHECK(quorum.members().is_gone(0));
  CHECK_FALSE(quorum.members().is_gone(1));
  CHECK_THROWS_AS(quorum.join(0, a, 0, at_ms(102)), Fenced);

  quorum.greet(0, 0, 0, at_ms(103));
  CHECK_FALSE(quorum.members().is_gone(0));
  add(quorum, 1, at_ms(103));
  quorum.begin_anew(rules(2, 0), at_ms(104));
  CHECK_FALSE(quorum.members().is_gone(1));
  CHECK(quorum.expire(at_ms(205)).empty());
  quorum.greet(1, 0, 0, at_ms(206));
  CHECK(quorum.expire(at_ms(307)) == std::vector<uint32_t>{1});
}

TEST_CASE("a new incarnation fences the old one, whose commit is forgotten", "[server]") {
  Quorum quorum = make(2, 0);
  const auto a = add(quorum, 0), b = add(quorum, 1);
  commit(quorum, 0, a, 1, {1});
  const auto again = quorum.greet(0, 0, 0, at_ms(1));
  CHECK_THROWS_AS(commit(quorum, 0, a, 1, {1}), Fenced);
  CHECK_THROWS_AS(quorum.greet(0, a, 0, at_ms(1)), Fenced);
  quorum.join(0, again, quorum.step_of_joiner(), at_ms(1));
  commit(quorum, 1, b, 1, {2});
  CHECK_FALSE(quorum.decision(1, 1));
  commit(quorum, 0, again, 1, {8});
  CHECK(quorum.decision(1, 1)->numbers == std::vector<double>{10});
}

TEST_CASE("a job that begins anew fences the one before and awaits all of its own", "[server]") {
  Quorum quorum = make(2, 0);
  const auto a = add(quorum, 0), b = add(quorum, 1);
  commit(quorum, 0, a, 1, {1});
  commit(quorum, 1, b, 1, {2});
  commit(quorum, 1, b, 2, {2});
  CHECK(quorum.members().has_joined(1));
  const auto early = quorum.greet(0, 0, 0, at_ms(1));
  CHECK_FALSE(quorum.members().has_joined(0));
  CHECK(quorum.begin_anew(rules(3, 0), at_ms(1)) == std::vector<uint32_t>{1});
  CHECK_THROWS_AS(quorum.members().touch(1, b, at_ms(1)), Fenced);
  CHECK_FALSE(quorum.members().has_joined(1));
  CHECK(quorum.members().workers() == 3);
  CHECK(quorum.members().live() == std::vector<uint32_t>{0, 1, 2});
  quorum.join(0, early, quorum.step_of_joiner(), at_ms(1));
  commit(quorum, 0, early, 3, {4});
  CHECK_FALSE(quorum.decision(0, 3));
  const auto c = add(quorum, 1, at_ms(2)), d = add(quorum, 2, at_ms(2));
  commit(quorum, 1, c, 3, {8});
  commit(quorum, 2, d, 3, {16});
  CHECK(quorum.decision(0, 3)->numbers == std::vector<double>{28});
}

TEST_CASE("nobody runs more than k steps ahead of the slowest live worker", "[server]") {
  Quorum quorum = make(2, 3);
  const auto a = add(quorum, 0), b = add(quorum, 1);
  for (uint64_t step = 1; step <= 3; ++step) {
    commit(quorum, 0, a, step, {});
    CHECK(quorum.decision(0, step));
  }
  commit(quorum, 0, a, 4, {});
  CHECK_FALSE(quorum.decision(0, 4));
  commit(quorum, 1, b, 1, {});
  CHECK(quorum.decision(0, 4));
  commit(quorum, 0, a, 5, {});
  CHECK_FALSE(quorum.decision(0, 5));
  quorum.members().touch(0, a, at_ms(200));
  CHECK(quorum.expire(at_ms(200)) == std::vector<uint32_t>{1});
  CHECK(quorum.decision(0, 5));
  add(quorum, 1, at_ms(200));
  CHECK(quorum.progress(0).slowest == 5);  // comes in beside the slowest

  Quorum any = make(2, kAnyStaleness);
  const auto alone = add(any, 0);
  commit(any, 0, alone, 1000, {});
  CHECK(any.decision(0, 1000));
}

TEST_CASE("members survive a snapshot, and tell what it forgot", "[server]") {
  Quorum quorum = make(2, 0);
  const auto a = add(quorum, 0), b = add(quorum, 1);
  commit(quorum, 0, a, 1, {1});
  commit(quorum, 1, b, 1, {2});
  const auto record = decode<Quorum::Record>(encode(quorum.record()));
  commit(quorum, 0, a, 2, {3});
  commit(quorum, 1, b, 2, {4});
  const auto second = *quorum.decision(0, 2);

  Quorum restored = make(2, 0);
  restored.restore(record, at_ms(500));
  CHECK(restored.decision(0, 1)->numbers == std::vector<double>{3});
  restored.members().touch(0, a, at_ms(500));
  commit(restored, 1, b, 2, {4}, at_ms(500));
  CHECK_FALSE(restored.decision(1, 2));
  restored.recall(second, at_ms(500));
  CHECK(*restored.decision(1, 2) == second);
  CHECK(restored.expire(at_ms(601)) == std::vector<uint32_t>{0, 1});
}

TEST_CASE("a server that started again decides nothing before those whom it forgot had time to come", "[server]") {
  Quorum quorum = make(2, 0);
  quorum.restore({}, kStart);  // nobody had joined yet
  const auto greet = [&](uint32_t rank) { return quorum.greet(rank, 7, 0, at_ms(1)); };
  const auto comes_back = [&](uint32_t rank) {
    quorum.join(rank, 7, 0, at_ms(1));
    quorum.members().note_return(rank, 7, 5);
    quorum.try_to_decide(at_ms(1));
  };
  greet(0);
  CHECK(quorum.members().may_push(1, 3, at_ms(1)));
  comes_back(0);
  commit(quorum, 0, 7, 6, {1}, at_ms(1));
  CHECK_FALSE(quorum.decision(0, 6));
  CHECK_FALSE(quorum.members().may_push(0, 4, at_ms(1)));  // it does not keep it any more
  CHECK(quorum.members().may_push(0, 5, at_ms(1)));

  SECTION("until the time is over") {
    quorum.members().touch(0, 7, at_ms(100));
    quorum.expire(at_ms(100));
    quorum.try_to_decide(at_ms(100));
    CHECK_FALSE(quorum.decision(0, 6));  // a rank below `workers` is awaited for longer
  }
  SECTION("until all are back whom a decision names") {
    Decision last;
    last.step = 5;
    last.members = last.next_members = {0, 1};
    quorum.recall(last, at_ms(1));
    greet(1);
    CHECK_FALSE(quorum.decision(0, 6));
    comes_back(1);
    CHECK_FALSE(quorum.members().awaits_unknown(at_ms(1)));
    commit(quorum, 1, 7, 6, {2}, at_ms(2));
    REQUIRE(quorum.decision(0, 6));
    CHECK(quorum.decision(0, 6)->members == std::vector<uint32_t>{0, 1});
  }
}

TEST_CASE("what is decided is not before a worker that is back came in", "[server]") {
  Quorum quorum = make(2, 0);
  quorum.restore(
      {.members = {{0}, {7}, {0}, {1}}, .clocks = {10}, .excused = {0}, .rests = {0}, .decision = {.step = 10}},
      kStart);  // a snapshot of the job before
  quorum.greet(1, 8, 0, at_ms(1));
  quorum.join(1, 8, 11, at_ms(1));
  quorum.recall(11);
  CHECK(quorum.step_of_joiner() == 11);
  quorum.recall(9);
  CHECK(quorum.step_of_joiner() == 11);
}

TEST_CASE("who was not waited for learns that a step was decided without it", "[server]") {
  Quorum quorum = make(1, 0);
  const auto a = add(quorum, 0);
  commit(quorum, 0, a, 1, {1});
  const auto late = quorum.greet(1, 0, 0, kStart);
  quorum.join(1, late, 0, kStart);
  CHECK_THROWS_AS(commit(quorum, 1, late, 1, {1}), Fenced);
}

TEST_CASE("incarnations ascend with the lives of server 0, whatever its clock says", "[server]") {
  Quorum quorum = make(1, 0);
  CHECK(quorum.greet(0, 0, 3, kStart) == (uint64_t{3} << 32) + 1);
  CHECK(quorum.greet(0, 0, 3, kStart) == (uint64_t{3} << 32) + 2);
  CHECK(quorum.greet(1, uint64_t{9} << 32, 3, kStart) == uint64_t{9} << 32);
  CHECK(quorum.greet(1, 0, 4, kStart) == (uint64_t{9} << 32) + 1);
}
