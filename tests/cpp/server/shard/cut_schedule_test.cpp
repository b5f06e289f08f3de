#include "server/shard/cut_schedule.h"

#include "cpp/catch.h"

using namespace muster::server;
using std::chrono::milliseconds;

namespace {

CutSchedule::Time after(int ms) { return CutSchedule::Time{} + milliseconds(ms); }

}  // namespace

TEST_CASE("steps are cut as often as it is said, and no cut begins before all have the last one", "[server]") {
  CutSchedule schedule;
  schedule.configure(milliseconds(100), after(0));
  CHECK((schedule.decide(1, after(99)) == Cut{false, 0}));
  CHECK((schedule.decide(2, after(100)) == Cut{true, 0}));
  CHECK_FALSE(schedule.decide(3, after(500)).is_due);
  schedule.note_complete(1, after(500));
  CHECK_FALSE(schedule.decide(4, after(500)).is_due);
  schedule.note_complete(2, after(510));
  CHECK((schedule.decide(5, after(510)) == Cut{true, 1}));
  schedule.note_complete(5, after(600));
  CHECK((schedule.decide(6, after(601)) == Cut{false, 2}));  // what is before the last cut that all have may go
}

TEST_CASE("a cut that is wanted waits as long as the last one took, one that is urgent or demanded does not",
          "[server]") {
  CutSchedule schedule;
  schedule.configure(milliseconds(1'000'000), after(0));
  schedule.want();
  CHECK(schedule.decide(1, after(1)).is_due);
  schedule.note_complete(1, after(41));
  schedule.want();
  CHECK_FALSE(schedule.decide(2, after(80)).is_due);
  CHECK(schedule.decide(3, after(81)).is_due);
  schedule.hurry();  // of a log that the cut under way will empty
  schedule.note_complete(3, after(90));
  CHECK_FALSE(schedule.decide(4, after(91)).is_due);
  schedule.hurry();
  CHECK(schedule.decide(5, after(92)).is_due);
  schedule.demand();
  CHECK_FALSE(schedule.decide(6, after(93)).is_due);  // one is under way
  schedule.note_complete(5, after(100));
  CHECK(schedule.decide(7, after(100)).is_due);
}

// One server may lose its snapshot of the step that all went back to before it has one of a later step.
TEST_CASE("a job that goes back to a step keeps the cut before it until the next one is everywhere", "[server]") {
  CutSchedule schedule;
  schedule.begin_at(2);
  CHECK(schedule.decide(3, after(0)).keep == 0);  // what all had before is not known
  schedule.begin_at(9);                           // further, since servers made steps again from workers' logs
  schedule.demand();
  CHECK((schedule.decide(10, after(0)) == Cut{true, 2}));
  schedule.note_complete(10, after(1));
  CHECK(schedule.decide(11, after(1)).keep == 9);
  schedule.begin_at(10);
  CHECK(schedule.decide(11, after(1)).keep == 9);
  schedule.begin_at(4);
  CHECK(schedule.decide(5, after(1)).keep == 0);
}
