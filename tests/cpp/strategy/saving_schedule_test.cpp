#include "strategy/saving_schedule.h"

#include <vector>

#include "cpp/catch.h"
#include "muster/error.h"

using namespace muster;

namespace {

// A chief whose steps take so long: after which it saves, and how often it is asked for the time.
struct SavingRun {
  explicit SavingRun(const std::vector<double>& seconds, bool is_alone = false) {
    double now = 100;
    SavingSchedule::Options options{.seconds = 100, .now = [&] { return now; }};
    if (!is_alone) {
      options.number_of_chief = [this](int64_t number) {
        ++asked;
        return number;
      };
    }
    SavingSchedule schedule(std::move(options));
    for (size_t step = 1; step <= seconds.size(); ++step) {
      now += seconds[step - 1];
      schedule.note_step(static_cast<int64_t>(step));
      if (!schedule.is_due()) continue;
      saved.push_back(static_cast<int64_t>(step));
      schedule.start_over();
    }
  }

  std::vector<int64_t> saved;
  int asked = 0;
};

using Steps = std::vector<int64_t>;

}  // namespace

TEST_CASE("a time is seldom asked for, and kept as if it were after each step", "[saving]") {
  const SavingRun together(std::vector<double>(650, 0.5));
  CHECK(together.saved == Steps{200, 400, 600});
  CHECK(together.asked < 3 * 18);
  const SavingRun alone(std::vector<double>(650, 0.5), /*is_alone=*/true);
  CHECK(alone.saved == together.saved);
  CHECK(alone.asked == 0);
}

TEST_CASE("first steps that are slow or fast do not decide", "[saving]") {
  std::vector<double> fast(23, 10);
  fast[0] = fast[1] = fast[2] = 0.001;
  const SavingRun slower(fast);
  REQUIRE(slower.saved.size() == 2);
  CHECK(slower.saved[0] <= 3 + 13);  // 3 + 10 where it is asked after each step
  std::vector<double> slow(101, 0.5);
  slow[0] = 60;
  CHECK(SavingRun(slow).saved == Steps{81});
}

TEST_CASE("a count of steps that is not seen whole is due once", "[saving]") {
  SavingSchedule schedule({.every = 3});
  const auto is_due_after = [&](int64_t steps) {
    schedule.note_step(steps);
    return schedule.is_due();
  };
  CHECK(!is_due_after(5));  // the first one of a job that goes on
  CHECK(is_due_after(7));
  CHECK(is_due_after(8));  // until it is saved
  schedule.start_over();
  CHECK(!schedule.is_due());
  CHECK(is_due_after(9));
  CHECK_THROWS_AS(SavingSchedule({.every = 0}), InvalidArgument);
  CHECK_THROWS_AS(SavingSchedule({.seconds = 0.0}), InvalidArgument);
}

TEST_CASE("steps count anew where a job goes back to an earlier checkpoint", "[saving]") {
  SavingSchedule schedule({.every = 100});
  schedule.note_step(200);
  CHECK(schedule.is_due());
  schedule.start_over();
  schedule.note_step(101);
  CHECK_FALSE(schedule.is_due());
}
