#include "window/skip_limit.h"

#include "cpp/catch.h"
#include "muster/error.h"
#include "support/run_ranks.h"

namespace muster {
namespace {

WindowSums skipped_at(const std::string& where) {
  WindowSums sums;
  sums.finite = false;
  sums.non_finite_at = where;
  return sums;
}

}  // namespace

TEST_CASE("windows that are skipped in a row end training at the limit, and say where", "[window]") {
  SkipLimit limit(2, c10::kCPU);
  limit.note(skipped_at(""), 1);
  CHECK(limit.searches());
  limit.check();
  limit.note(WindowSums(), 2);
  CHECK_FALSE(limit.searches());
  limit.note(skipped_at(""), 3);
  limit.check();
  limit.note(skipped_at("parameter 'w' of replica 1"), 4);
  const auto message = testing::message_of<NonFinite>([&] { limit.check(); });
  CHECK(testing::contains(message, "in 2 windows in a row, the last at step 4, first in parameter 'w' of replica 1;"));
}

TEST_CASE("a limit of one always searches, and no skipped window passes none", "[window]") {
  SkipLimit limit(1, c10::kCPU);
  limit.note(WindowSums(), 1);
  CHECK(limit.searches());
  limit.check();
  limit.note(skipped_at(""), 2);
  CHECK_THROWS_AS(limit.check(), NonFinite);
  SkipLimit none(0, c10::kCPU);
  none.note(WindowSums(), 1);
  none.check();
}

}  // namespace muster
