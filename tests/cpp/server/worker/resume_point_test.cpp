#include "server/worker/resume_point.h"

#include "cpp/catch.h"

using namespace muster::server;

namespace {

Configured configured(uint64_t made, uint64_t begun, std::vector<uint64_t> cuts, uint64_t command = 0) {
  Configured configured;
  configured.started = configured.owns = true;
  configured.made = made;
  configured.begun = begun;
  configured.cuts = std::move(cuts);
  if (command > 0) configured.command.emplace_back().step = command;
  return configured;
}

}  // namespace

TEST_CASE("a job goes on after the newest step where no server is more than it behind", "[server]") {
  const std::vector<Configured> equal = {configured(7, 7, {}), configured(7, 7, {4}), Configured{}};
  REQUIRE(ResumePoint(equal).newest());
  CHECK(ResumePoint(equal).newest()->step == 7);
  CHECK(ResumePoint(equal).newest()->command.empty());

  const std::vector<Configured> behind = {configured(7, 7, {}, 7), configured(6, 6, {}, 6)};
  REQUIRE(ResumePoint(behind).newest());
  CHECK(ResumePoint(behind).newest()->command.front().step == 7);

  // It was said to one, and made by none.
  const std::vector<Configured> said = {configured(6, 6, {}, 7), configured(6, 6, {}, 6)};
  REQUIRE(ResumePoint(said).newest());
  CHECK(ResumePoint(said).newest()->step == 7);

  const std::vector<Configured> without_command = {configured(7, 7, {}), configured(6, 6, {})};
  CHECK_FALSE(ResumePoint(without_command).newest());
  const std::vector<Configured> far = {configured(8, 8, {}, 8), configured(6, 6, {}, 6)};
  CHECK_FALSE(ResumePoint(far).newest());
}

TEST_CASE("a job goes back to the greatest step that every server can go on from", "[server]") {
  const std::vector<Configured> cut = {configured(20, 20, {10, 15, 20}), configured(15, 15, {10, 15}),
                                       configured(31, 32, {10, 15})};
  CHECK(ResumePoint(cut).common() == 15);
  const std::vector<Configured> alive = {configured(17, 17, {10}), configured(12, 17, {10, 17})};
  CHECK(ResumePoint(alive).common() == 17);
  const std::vector<Configured> none = {configured(17, 17, {10}), configured(4, 5, {3})};
  CHECK_FALSE(ResumePoint(none).common());
  CHECK(ResumePoint(none).in_words(0) == "step 10, 17");
  CHECK(ResumePoint(none).in_words(1) == "step 3");
}
