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
  still.note_silent(after(5'000));
  still.note_silent(after(10'000));
  CHECK_FALSE(still.is_over(after(35'000)));
  CHECK(still.is_over(after(35'001)));

  Absence died(begin, seconds(5));
  died.note_silent(after(5'000));
  died.note_gone(after(11'000));
  died.note_gone(after(12'000));
  CHECK_FALSE(died.is_over(after(16'000)));
  CHECK(died.is_over(after(16'001)));

  Absence patient(begin, seconds(60));
  patient.note_silent(after(5'000));
  CHECK_FALSE(patient.is_over(after(65'000)));
  CHECK(patient.is_over(after(65'001)));

  Absence busy(begin, seconds(5));
  busy.note_busy(after(50'000));
  CHECK_FALSE(busy.is_over(after(55'000)));
  CHECK(busy.is_over(after(55'001)));
}
