#include "server/shard/held_sums.h"

#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "cpp/catch.h"

using namespace muster;
using namespace muster::server;

namespace {

kernels::NormSum norm_of(double partial) {
  kernels::NormSum sum;
  kernels::add_partial(sum, partial, 2);
  return sum;
}

// Notes what it is asked to add and to step.
class Noted final : public HeldSums {
 public:
  using HeldSums::facts_of_steps;
  using HeldSums::HeldSums;
  using HeldSums::lock_after;

  std::unique_ptr<Image> begin_image() override { return nullptr; }
  bool restore(const Image::Facts&, const checkpoint::NamedTensors&) override { return true; }

  std::string calls;

 private:
  kernels::NormSum add(uint64_t step, const std::vector<uint32_t>& members) override {
    calls += "add " + std::to_string(step) + ";";
    return norm_of(static_cast<double>(step * 10 + members.size()));
  }
  void step(const Apply& apply, const WorkerSums* given) override {
    calls += (given != nullptr ? "alone " : "step ") + std::to_string(apply.step) + ";";
  }
};

constexpr std::array<std::byte, 8> kBytes{};

bool push(HeldSums& sums, uint32_t rank, uint64_t step) { return sums.keep(rank, 1, {step}, {}, Bytes(kBytes), {}); }

Apply command(uint64_t step, std::vector<uint32_t> members) {
  Apply apply;
  apply.step = step;
  apply.members = std::move(members);
  return apply;
}

Deadline soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(60); }

struct Rules {
  explicit Rules(bool is_synchronous)
      : steps(is_synchronous, [](std::optional<uint32_t>, uint64_t) { return false; }, time) {}

  Timekeeper time;
  Steps steps;
};

}  // namespace

TEST_CASE("sums are added once and stay for a slow member until the next step", "[server]") {
  Rules rules(true);
  Noted sums(rules.steps);
  CHECK(push(sums, 0, 1));
  sums.sum_early(1, {0, 1});
  CHECK(sums.calls.empty());  // one of them has not pushed
  CHECK(push(sums, 1, 1));
  CHECK_FALSE(push(sums, 1, 1));
  sums.sum_early(1, {0, 1});
  CHECK(sums.sum(1, {0, 1}, soon()) == norm_of(12));
  CHECK_FALSE(sums.facts_of_steps().has_norm);
  sums.apply_together(command(1, {0, 1}), soon());
  sums.apply_together(command(1, {0, 1}), soon());
  CHECK(sums.calls == "add 1;step 1;");
  CHECK(sums.sum(1, {0, 1}, soon()) == norm_of(12));
  CHECK(sums.facts_of_steps().has_norm);
  CHECK(sums.facts_of_steps().norm == norm_of(12));
  CHECK_THROWS_AS(sums.sum(1, {0}, soon()), InvalidArgument);  // it was made of other parts
  CHECK(push(sums, 0, 2));
  CHECK(sums.settle(command(2, {0})));
  CHECK_THROWS_AS(sums.sum(1, {0, 1}, soon()), InvalidArgument);
  CHECK(rules.steps.held_bytes == 0);
}

TEST_CASE("a push that comes after its sums are made ahead is added with the others", "[server]") {
  Rules rules(true);
  Noted sums(rules.steps);
  CHECK(push(sums, 0, 1));
  sums.sum_early(1, {0});
  CHECK(sums.keep(0, 2, {1}, {}, Bytes(kBytes), {}));  // of a later incarnation
  sums.sum_early(1, {0});
  CHECK(sums.calls == "add 1;add 1;");
}

TEST_CASE("a step that was left is made where everything is there", "[server]") {
  Rules rules(true);
  Noted sums(rules.steps);
  push(sums, 0, 1);
  CHECK_FALSE(sums.settle(command(1, {0, 1})));
  CHECK(sums.settle(command(1, {0})));
  CHECK(sums.settle(command(1, {0})));
  CHECK_FALSE(sums.settle(command(3, {0})));
  CHECK(sums.calls == "add 1;step 1;");
}

// A worker that comes in after a step was decided reads what it made, and those who decided it may be gone.
TEST_CASE("who waits for a step that nobody can bring is told so at once", "[server]") {
  Rules rules(true);
  Noted sums(rules.steps);
  CHECK_THROWS_WITH(sums.lock_after(1, soon()), Catch::Matchers::Contains("nobody has the parts of step 1 any more"));
  push(sums, 0, 1);
  CHECK_THROWS_AS(sums.lock_after(1, soon()), CheckpointError);  // nobody says what it is made of
  rules.steps.note_command(command(1, {0}));
  CHECK(sums.lock_after(1, soon()));
  CHECK(sums.calls == "add 1;step 1;");
}

TEST_CASE("a step is made of all its members' parts or not at all", "[server]") {
  Rules rules(true);  // nobody may push any more
  Noted sums(rules.steps);
  push(sums, 0, 1);
  CHECK_THROWS_WITH(sums.apply_together(command(1, {0, 1}), soon()), Catch::Matchers::Contains("from workers 1"));
  push(sums, 0, 3);
  CHECK_THROWS_WITH(sums.apply_together(command(3, {0}), soon()), Catch::Matchers::Contains("steps 1 to 2"));
  CHECK(sums.steps() == 0);
}

TEST_CASE("a step's command must be the one that it was begun by", "[server]") {
  Rules rules(true);
  auto& steps = rules.steps;
  steps.note_command(command(1, {0, 1}));
  steps.note_command(command(1, {0, 1}));
  CHECK_THROWS_AS(steps.note_command(command(1, {1})), CheckpointError);
  steps.close();
  steps.note_command(command(1, {0, 1}));
  CHECK_THROWS_AS(steps.note_command(command(2, {0, 1})), Fenced);
  steps.open(0);
  CHECK(steps.command() == nullptr);
  steps.note_command(command(1, {1}));
}

TEST_CASE("what is asked to be done at a step is done then, once", "[server]") {
  Rules rules(true);
  Noted sums(rules.steps);
  std::string seen;
  const auto note = [&](const char* what) { return [&seen, what] { seen += what; }; };
  CHECK(sums.when_made(0, note("0;")));
  CHECK(sums.when_made(1, note("1;")));
  CHECK(sums.when_made(1, note("again;")));
  CHECK(sums.when_made(2, note("2;")));
  CHECK(seen == "0;");
  push(sums, 0, 1);
  CHECK(sums.settle(command(1, {0})));
  CHECK(seen == "0;1;again;");
  CHECK_FALSE(sums.when_made(0, note("late;")));
  CHECK(seen == "0;1;again;");
}

TEST_CASE("pushes of incarnations that are gone are dropped, and stay out", "[server]") {
  Rules rules(false);
  Noted sums(rules.steps);
  const auto push_as = [&](uint64_t incarnation, uint64_t step) {
    return sums.keep(1, incarnation, {step}, {}, Bytes(kBytes), {});
  };
  for (uint64_t incarnation = 1; incarnation <= 100; ++incarnation) {
    CHECK(push_as(incarnation, incarnation));
    const auto lock = sums.lock();
    if (incarnation % 2 == 0) sums.drop(1, incarnation);
  }
  CHECK_FALSE(push_as(100, 101));
  CHECK(rules.steps.held_bytes == 0);
}

TEST_CASE("the step of one worker is made once, from what it pushed", "[server]") {
  Rules rules(false);
  Noted sums(rules.steps);
  push(sums, 3, 1);
  const auto lock = sums.lock();
  sums.apply_alone(3, 1, command(1, {3}));
  sums.apply_alone(3, 1, command(1, {3}));
  CHECK(sums.calls == "alone 1;");
  CHECK(sums.step_of(3, 1) == 1);
  CHECK(rules.steps.held_bytes == 0);
}
