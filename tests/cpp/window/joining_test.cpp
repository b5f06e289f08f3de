// A worker that joins: what it asks for, what it waits for, and when it takes part.
#include "window/joining.h"

#include "cpp/catch.h"
#include "server/protocol/wire.h"

using namespace muster;

namespace {

constexpr kernels::LossScaleState kScale{.scale = 4, .growth_tracker = 2};

// A member's report of a window, as its record carries it; `since`: when the member came in.
std::string report_of(uint64_t since, uint64_t steps) {
  Joining member;
  member.begin_hearing();
  member.hear(/*watches=*/true, {});
  JoinReport report;
  report.steps = steps;
  member.prepare_report(report);
  return member.tell(since, 0.5, kScale);
}

// A window whose records were exchanged with one earlier member.
void end_window(Joining& joining, const std::string& report) {
  CHECK(joining.tell(9, 1, kScale).empty());
  joining.begin_hearing();
  joining.hear(/*watches=*/true, {});
  joining.hear(/*watches=*/false, report);
}

}  // namespace

TEST_CASE("a member tells what it is asked for, and nothing else", "[window]") {
  Joining member;
  CHECK_FALSE(member.watches());
  CHECK(member.tell(1, 1, kScale).empty());
  member.begin_hearing();
  member.hear(/*watches=*/false, {});
  CHECK_FALSE(member.is_asked());
  const auto report = server::decode<JoinReport>(report_of(3, 7));
  CHECK(report.since == 3);
  CHECK(report.unit == 0.5);
  CHECK(report.loss_scale == 4);
  CHECK(report.growth_tracker == 2);
  CHECK(report.steps == 7);
}

TEST_CASE("a worker takes part after a stepped window that began with the others' buffers", "[window]") {
  Joining joining;
  joining.begin();
  end_window(joining, report_of(0, 5));
  joining.note_buffers();
  // The report is older than the buffers.
  CHECK_FALSE(joining.learn(/*stepped=*/true));
  CHECK(joining.state() == Joining::State::adopting);
  end_window(joining, report_of(0, 6));
  CHECK_FALSE(joining.learn(/*stepped=*/false));
  end_window(joining, report_of(0, 7));
  REQUIRE(joining.heard() != nullptr);
  const auto learnt = joining.learn(/*stepped=*/true);
  REQUIRE(learnt);
  CHECK(learnt->steps == 7);
  CHECK_FALSE(joining.watches());
  CHECK(joining.heard() == nullptr);
}

TEST_CASE("a worker believes the member that came in first", "[window]") {
  Joining joining;
  joining.begin();
  end_window(joining, report_of(4, 1));
  joining.hear(/*watches=*/false, report_of(2, 2));
  joining.hear(/*watches=*/false, report_of(3, 3));
  REQUIRE(joining.heard() != nullptr);
  CHECK(joining.heard()->steps == 2);
}

TEST_CASE("a worker takes part without a report where nobody is left who knows more", "[window]") {
  Joining joining;
  joining.begin();
  joining.tell(9, 1, kScale);
  joining.begin_hearing();
  joining.hear(/*watches=*/true, {});
  CHECK_FALSE(joining.learn(/*stepped=*/false));
  CHECK_FALSE(joining.watches());
}
