#include "server/shard/held_sums.h"

#include <array>
#include <chrono>
#include <string>

#include "cpp/catch.h"

using namespace muster;
using namespace muster::server;

namespace {

// Notes what it is asked to add and to step.
class Noted final : public HeldSums {
 public:
  using HeldSums::HeldSums;
  using HeldSums::made;

  std::string calls;

 private:
  void add(uint64_t step, const std::vector<uint32_t>& members, Statistics& statistics) override {
    calls += "add " + std::to_string(step) + ";";
    statistics.partials.assign(1, static_cast<double>(step * 10 + members.size()));
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

Steps rules(bool is_synchronous) {
  return {is_synchronous, [](uint32_t, uint64_t) { return false; }};
}

}  // namespace

TEST_CASE("sums are added once and stay for a slow member until the next step", "[server]") {
  auto steps = rules(true);
  Noted sums(steps);
  CHECK(push(sums, 0, 1));
  sums.sum_early(1, {0, 1});
  CHECK(sums.calls.empty());  // one of them has not pushed
  CHECK(push(sums, 1, 1));
  CHECK_FALSE(push(sums, 1, 1));
  sums.sum_early(1, {0, 1});
  auto lock = sums.lock();
  CHECK(sums.sum(lock, 1, {0, 1}, soon()).partials == std::vector<double>{12});
  lock.unlock();
  sums.apply_together(command(1, {0, 1}), soon());
  sums.apply_together(command(1, {0, 1}), soon());
  CHECK(sums.calls == "add 1;step 1;");
  lock.lock();
  CHECK(sums.sum(lock, 1, {0, 1}, soon()).partials == std::vector<double>{12});
  CHECK((sums.made() != nullptr && sums.made()->step == 1));
  lock.unlock();
  CHECK(sums.skip_to(2, nullptr));
  lock.lock();
  CHECK(sums.made() == nullptr);
  CHECK_THROWS_AS(sums.sum(lock, 1, {0, 1}, soon()), InvalidArgument);
  lock.unlock();
  CHECK(steps.held_bytes == 0);
}

TEST_CASE("a push that comes after its sums are made ahead is added with the others", "[server]") {
  auto steps = rules(true);
  Noted sums(steps);
  CHECK(push(sums, 0, 1));
  sums.sum_early(1, {0});
  CHECK(sums.keep(0, 2, {1}, {}, Bytes(kBytes), {}));  // of a later incarnation
  sums.sum_early(1, {0});
  CHECK(sums.calls == "add 1;add 1;");
}

TEST_CASE("a step that was left is made where everything is there, else left out", "[server]") {
  auto steps = rules(true);
  Noted sums(steps);
  push(sums, 0, 1);
  const auto apply = command(1, {0});
  CHECK(sums.skip_to(1, &apply));
  CHECK_FALSE(sums.skip_to(1, &apply));
  CHECK(sums.skip_to(3, nullptr));
  CHECK(sums.calls == "add 1;step 1;");
  CHECK(sums.steps() == 3);
}

TEST_CASE("the step of one worker is made once, from what it pushed", "[server]") {
  auto steps = rules(false);
  Noted sums(steps);
  push(sums, 3, 1);
  const auto lock = sums.lock();
  sums.apply_alone(3, 1, command(1, {3}));
  sums.apply_alone(3, 1, command(1, {3}));
  CHECK(sums.calls == "alone 1;");
  CHECK(sums.step_of(3, 1) == 1);
  CHECK(steps.held_bytes == 0);
}
