#include "server/shard/dealer.h"

#include "cpp/catch.h"
#include "muster/error.h"

using namespace muster;
using namespace muster::server;

namespace {

// A worker's requests about a pass of three batches.
struct Asker {
  Dealer& dealer;
  uint32_t rank;
  uint64_t incarnation = 1;
  uint64_t request = 0;

  Dealt ask(std::vector<uint64_t> finished = {}, uint64_t epoch = 0) {
    return dealer.deal(rank, incarnation, {++request, 7, epoch, 3, false, std::move(finished)});
  }
  void end() { dealer.deal(rank, incarnation, {++request, 7, 0, 3, true, {}}); }
};

bool is_batch(const Dealt& dealt, uint64_t batch) { return dealt.state == Dealt::State::dealt && dealt.batch == batch; }

}  // namespace

TEST_CASE("batches are dealt in order, and a pass ends when all are finished", "[server]") {
  Dealer dealer;
  Asker a{dealer, 0};
  Asker b{dealer, 1};
  CHECK(is_batch(a.ask(), 0));
  CHECK(is_batch(b.ask(), 1));
  CHECK(is_batch(a.ask(), 2));
  CHECK(b.ask().state == Dealt::State::none);
  dealer.finish(0, {{7, 0, 0}, {7, 0, 2}});
  dealer.finish(0, {{7, 0, 1}});  // was not dealt to it
  CHECK(a.ask().state == Dealt::State::none);
  CHECK(b.ask({1}).state == Dealt::State::ended);
  CHECK(a.ask().state == Dealt::State::ended);
  CHECK(is_batch(a.ask({}, 1), 0));  // another epoch
}

TEST_CASE("a repeated request is answered as before", "[server]") {
  Dealer dealer;
  Asker a{dealer, 0};
  CHECK(is_batch(a.ask(), 0));
  --a.request;
  CHECK(is_batch(a.ask(), 0));
  CHECK(is_batch(a.ask(), 1));
  // Another life of the worker counts its requests anew.
  a.request = 1;
  a.incarnation = 2;
  CHECK(is_batch(a.ask(), 2));
}

TEST_CASE("a request that comes after later ones is dealt nothing", "[server]") {
  Dealer dealer;
  Asker a{dealer, 0};
  Asker b{dealer, 1};
  CHECK(is_batch(a.ask(), 0));
  CHECK(is_batch(a.ask(), 1));
  a.request -= 2;
  a.ask();  // over a connection that nobody reads any more
  CHECK(is_batch(b.ask(), 2));
}

TEST_CASE("a batch whose worker comes back without it is dealt to one worker", "[server]") {
  Dealer dealer;
  Asker a{dealer, 0};
  Asker b{dealer, 1};
  CHECK(is_batch(a.ask(), 0));  // an answer that is lost
  dealer.put_right(0, {}, {});
  --a.request;
  SECTION("to the one that asks again") {
    CHECK(is_batch(a.ask(), 0));
    CHECK(is_batch(b.ask(), 1));
  }
  SECTION("or to another") {
    CHECK(is_batch(b.ask(), 0));
    CHECK(is_batch(a.ask(), 1));
  }
}

TEST_CASE("what a worker leaves unfinished is dealt again, before the rest", "[server]") {
  Dealer dealer;
  Asker a{dealer, 0};
  Asker b{dealer, 1};
  CHECK(is_batch(a.ask(), 0));
  CHECK(is_batch(a.ask(), 1));
  dealer.finish(0, {{7, 0, 0}});
  SECTION("by dying") { dealer.take_back(0); }
  SECTION("by ending its pass") { a.end(); }
  CHECK(is_batch(b.ask(), 1));
  dealer.finish(0, {{7, 0, 1}});  // too late
  CHECK(is_batch(b.ask({1}), 2));
  CHECK(b.ask({2}).state == Dealt::State::ended);
}

TEST_CASE("dealt batches survive a restart", "[server]") {
  Dealer dealer;
  Asker a{dealer, 0};
  Asker b{dealer, 1};
  a.ask();
  b.ask();
  dealer.take_back(1);
  Dealer again;
  again.restore(decode<Dealer::Record>(encode(dealer.record())));
  Asker c{again, 2};
  CHECK(is_batch(c.ask(), 1));
  CHECK(is_batch(c.ask({1}), 2));
  CHECK(c.ask({2}).state == Dealt::State::none);
  again.take_back(0);
  CHECK(is_batch(c.ask(), 0));
  auto damaged = dealer.record();
  damaged.passes.front().holders.push_back(1);
  CHECK_THROWS_AS(again.restore(damaged), CheckpointError);
}

TEST_CASE("a job that goes on deals what was undone, and then the rest", "[server]") {
  Dealer dealer;
  Asker a{dealer, 0};
  Asker b{dealer, 1};
  CHECK(dealer.progress().empty());
  CHECK(is_batch(a.ask(), 0));
  CHECK(is_batch(b.ask(), 1));
  dealer.finish(1, {{7, 0, 1}});
  const std::vector<PassProgress> expected{{7, 0, 3, 2, {0}}};
  CHECK((dealer.progress() == expected));

  Dealer next;
  next.go_on(dealer.progress());
  CHECK((next.progress() == expected));
  CHECK((next.newest() == std::vector<PassId>{{7, 0}}));
  Asker c{next, 1};
  CHECK(is_batch(c.ask(), 0));
  CHECK(is_batch(c.ask({0}), 2));
  CHECK(c.ask({2}).state == Dealt::State::ended);
  next.go_on(next.progress());  // of a pass that is over
  CHECK(c.ask().state == Dealt::State::ended);

  next.go_on({{7, 0, 0, 2, {}}});  // where another strategy had it
  CHECK(is_batch(c.ask(), 2));
  next.go_on({{7, 0, 0, 4, {}}});
  Asker d{next, 4};
  CHECK_THROWS_WITH(d.ask(), ContainsSubstring("at least 4"));
}

TEST_CASE("a job does not go on where no pass can be", "[server]") {
  Dealer dealer;
  const PassProgress wrong[] = {{7, 0, 3, 4, {}}, {7, 0, 3, 2, {2}}, {7, 0, 3, 2, {1, 0}}, {7, 0, 3, 2, {1, 1}}};
  for (const auto& pass : wrong) CHECK_THROWS_AS(dealer.go_on({pass}), InvalidArgument);
  CHECK(dealer.progress().empty());
}

TEST_CASE("the newest pass of each loader is known, also once it is over", "[server]") {
  Dealer dealer;
  CHECK(dealer.newest().empty());
  uint64_t request = 0;
  for (const uint64_t epoch : {0, 2, 1}) dealer.deal(0, 1, {++request, 7, epoch, 1, false, {}});
  for (uint64_t epoch = 0; epoch < kMaxPasses; ++epoch) {
    dealer.deal(0, 1, {++request, 9, epoch, 0, false, {}});
  }
  dealer.deal(0, 1, {++request, 3, 5, 1, false, {}});
  const std::vector<PassId> newest{{3, 5}, {7, 2}, {9, kMaxPasses - 1}};
  CHECK((dealer.newest() == newest));
  Dealer again;
  again.restore(decode<Dealer::Record>(encode(dealer.record())));
  CHECK((again.newest() == newest));
}

TEST_CASE("workers must count the same batches, and passes are bounded", "[server]") {
  Dealer dealer;
  dealer.deal(0, 1, {1, 0, 0, 10, false, {}});
  CHECK_THROWS_AS(dealer.deal(1, 1, {1, 0, 0, 11, false, {}}), LayoutMismatch);
  for (uint64_t epoch = 1; epoch < kMaxPasses; ++epoch) dealer.deal(0, 1, {epoch + 1, 0, epoch, 10, false, {}});
  CHECK_THROWS_AS(dealer.deal(0, 1, {1000, 0, 1000, 10, false, {}}), InvalidArgument);
  // Those that ended make room.
  dealer.take_back(0);
  for (uint64_t request = 2000, batch = 0; batch < 10; ++batch, ++request) {
    dealer.deal(0, 1,
                {request, 0, 5, 10, false, batch == 0 ? std::vector<uint64_t>{} : std::vector<uint64_t>{batch - 1}});
  }
  dealer.finish(0, {{0, 5, 9}});
  CHECK(is_batch(dealer.deal(0, 1, {3000, 0, 1000, 10, false, {}}), 0));
}

TEST_CASE("who comes back after a restart puts right what it was dealt since", "[server]") {
  Dealer dealer;
  const auto next = [&](uint32_t rank, uint64_t request) {
    return dealer.deal(rank, 1, {request, 0, 0, 8, false, {}});
  };
  CHECK(next(0, 1).batch == 0);
  CHECK(next(1, 1).batch == 1);
  // The server had dealt up to batch 5 before it died, of which its snapshot knows nothing.
  dealer.put_right(0, {{0, 0, 4}}, {{0, 0, 0}, {0, 0, 2}});
  dealer.put_right(1, {{0, 0, 1}}, {{0, 0, 5}});
  dealer.put_right(2, {{0, 9, 3}}, {});  // of a pass that it does not know
  CHECK(next(2, 1).batch == 3);
  CHECK(next(2, 2).batch == 6);
  CHECK(next(2, 3).batch == 7);
  CHECK(next(0, 2).state == Dealt::State::none);
  dealer.finish(0, {{0, 0, 4}});
  dealer.finish(1, {{0, 0, 1}});
  dealer.finish(2, {{0, 0, 3}, {0, 0, 6}, {0, 0, 7}});
  CHECK(next(0, 3).state == Dealt::State::ended);
  CHECK((dealer.newest() == std::vector<PassId>{{0, 9}}));
}

TEST_CASE("a batch of a number that no pass has is left out", "[server]") {
  Dealer dealer;
  Asker a{dealer, 0};
  CHECK(is_batch(a.ask(), 0));
  const uint64_t far = GENERATE(uint64_t{1} << 23, uint64_t{1} << 63);
  dealer.put_right(1, {{7, 0, far}}, {});
  CHECK(dealer.progress().front().next == 1);
  CHECK(is_batch(a.ask({0}), 1));
}
