// How many steps a loader's batches go into, and which loop stands at its end.
#include "data/loader_progress.h"

#include <memory>

#include "cpp/catch.h"

using namespace muster;
using muster::detail::BatchCalls;
using muster::detail::LoaderProgress;

namespace {

// Whether each of `count` calls of a batch was the last one expected.
std::vector<bool> calls_of(BatchCalls& calls, int64_t batch, int count, bool is_last = false) {
  std::vector<bool> ends;
  for (int i = 0; i < count; ++i) {
    ends.push_back(calls.ends(batch, is_last));
    calls.note(batch, is_last);
  }
  return ends;
}

using Ends = std::vector<bool>;

}  // namespace

TEST_CASE("a last batch goes into as many steps as the batch before it", "[loader]") {
  BatchCalls calls;
  calls_of(calls, 1, 4);
  calls_of(calls, 2, 4);
  CHECK(calls_of(calls, 3, 4, /*is_last=*/true) == Ends{false, false, false, true});
  CHECK_FALSE(calls.fell_short(4));
}

TEST_CASE("a last batch goes into as many steps as the last one of the pass before", "[loader]") {
  BatchCalls calls;
  calls_of(calls, 1, 4);
  CHECK(calls_of(calls, 2, 2, /*is_last=*/true) == Ends{false, false});
  CHECK_FALSE(calls.fell_short(2));
  CHECK(calls.fell_short(3));
  calls_of(calls, 3, 3);
  CHECK(calls_of(calls, 4, 2, /*is_last=*/true) == Ends{false, true});
  CHECK_FALSE(calls.fell_short(5));
}

TEST_CASE("a batch of which nothing is known goes into one step", "[loader]") {
  BatchCalls calls;
  CHECK(calls_of(calls, 1, 2, /*is_last=*/true) == Ends{true, true});
  CHECK(calls_of(calls, 2, 2, /*is_last=*/true) == Ends{false, true});
}

TEST_CASE("a batch that was a pass's last in one call is so in all", "[loader]") {
  BatchCalls calls;
  calls_of(calls, 1, 3);
  calls_of(calls, 2, 1, /*is_last=*/true);
  calls_of(calls, 2, 1, /*is_last=*/false);
  CHECK(calls.fell_short(3));
  calls_of(calls, 3, 3);
  CHECK(calls_of(calls, 4, 2, /*is_last=*/true) == Ends{false, true});
}

TEST_CASE("a loop stands at its end until it is gone, or others have gone on", "[loader]") {
  const auto loader = std::make_shared<LoaderProgress>();
  const auto other = std::make_shared<LoaderProgress>();
  const std::vector<std::weak_ptr<LoaderProgress>> loaders{loader, other};
  const int64_t pass = loader->begin_pass();
  other->begin_pass();
  CHECK(loader->note_yield(false) == 1);
  CHECK_FALSE(loader->may_stand_at_end(loaders));
  CHECK(loader->note_yield(true) == 2);
  CHECK(loader->last_batch == 2);
  CHECK(loader->may_stand_at_end(loaders));
  other->note_yield(false);
  CHECK(loader->may_stand_at_end(loaders));
  SECTION("a loop over another has got two batches since") {
    other->note_yield(false);
    CHECK_FALSE(loader->may_stand_at_end(loaders));
  }
  SECTION("a loop of run() alone has") {
    other->in_run = true;
    other->note_yield(false);
    CHECK(loader->may_stand_at_end(loaders));
  }
  SECTION("it is gone") {
    loader->leave(pass);
    loader->leave(pass - 1);
    CHECK_FALSE(loader->may_stand_at_end(loaders));
    loader->begin_pass();
    CHECK(loader->last_batch == 0);
    CHECK(loader->note_yield(true) == 3);
    CHECK(loader->may_stand_at_end(loaders));
  }
}
