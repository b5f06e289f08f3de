#include "server/worker/absence.h"

#include "cpp/catch.h"

using namespace muster::server;
using std::chrono::milliseconds;
using std::chrono::seconds;

TEST_CASE("a server that is away has the patience, one that stands still more, and one that is busy all it needs",
          "[server]") {
  const auto begin = Absence::TimePoint() + seconds(100);
  const auto after = [&](int64_t ms) { return begin + milliseconds(ms); };
  Absence away(begin, seconds(5));
  away.note_gone(after(100));
  CHECK_FALSE(away.is_over(after(5'000)));
  CHECK(away.is_over(after(5'001)));

  Absence still(begin, seconds(5));
  still.note_silent();
  still.note_silent();
  CHECK_FALSE(still.is_over(after(30'000)));
  CHECK(still.is_over(after(30'001)));

  Absence both(begin, seconds(5));  // in turns, for ever
  for (int64_t ms = 5'000; ms < 60'000; ms += 4'000) {
    both.note_silent();
    both.note_gone(after(ms));
  }
  both.note_silent();
  CHECK(both.is_over(after(30'001)));

  Absence died(begin, seconds(5));
  died.note_silent();
  died.note_gone(after(11'000));
  died.note_gone(after(12'000));
  CHECK_FALSE(died.is_over(after(16'000)));
  CHECK(died.is_over(after(16'001)));

  Absence patient(begin, seconds(60));
  patient.note_silent();
  CHECK_FALSE(patient.is_over(after(60'000)));
  CHECK(patient.is_over(after(60'001)));

  Absence busy(begin, seconds(5));
  busy.note_busy(after(50'000));
  CHECK_FALSE(busy.is_over(after(55'000)));
  CHECK(busy.is_over(after(55'001)));
}
