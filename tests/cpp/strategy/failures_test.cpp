#include "strategy/failures.h"

#include <stdexcept>

#include "cpp/catch.h"
#include "muster/error.h"
#include "support/run_ranks.h"

namespace muster {
namespace {

template <class E>
std::exception_ptr error_with(E error) {
  return std::make_exception_ptr(std::move(error));
}

ReplicaRun failed_with(std::exception_ptr error, std::exception_ptr transport = nullptr) {
  ReplicaRun run;
  run.error = std::move(error);
  run.transport = std::move(transport);
  return run;
}

const auto kRemote = error_with(RemoteError(1, 3, "ValueError", "x", "another's"));

std::string raised_by(const std::vector<ReplicaRun>& outcomes, const std::vector<WindowSums::Failed>& told) {
  try {
    Failures().raise(outcomes, told, /*rank=*/0);
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("an error's words say its type, its text and what it means to others", "[strategy]") {
  const Failures failures;
  const auto own = failures.describe(error_with(std::runtime_error("mine")));
  CHECK(own.type == "std::runtime_error");
  CHECK(own.text == "mine");
  CHECK(own.kind == Failure::Kind::own);
  CHECK(failures.is(kRemote, Failure::Kind::remote));
  CHECK(failures.is(error_with(CommError("gone")), Failure::Kind::transport));
  CHECK_FALSE(failures.is(nullptr, Failure::Kind::own));
  CHECK(peers_know(error_with(LayoutMismatch("differs"))));
  CHECK_FALSE(peers_know(error_with(std::runtime_error("mine"))));
}

TEST_CASE("an own error is raised before a broken transport, that before others' failures", "[strategy]") {
  const auto own = error_with(std::runtime_error("mine"));
  const auto broken = error_with(CommError("broken"));
  const WindowSums::Failed here{0, 1, {"A", "here"}};
  const WindowSums::Failed there{2, 5, {"B", "there"}};
  CHECK(raised_by({ReplicaRun()}, {}).empty());
  CHECK(raised_by({failed_with(kRemote), failed_with(nullptr, broken), failed_with(own)}, {here}) == "mine");
  CHECK(raised_by({failed_with(kRemote), failed_with(nullptr, broken)}, {here}) == "broken");
  CHECK(raised_by({failed_with(kRemote)}, {here, there}) ==
        "the step of replica 5 on rank 2 raised B: there; the window was dropped on all ranks and training can go on");
  CHECK(testing::contains(raised_by({}, {here}), "replica 1 on rank 0 raised A: here"));
  CHECK(raised_by({failed_with(kRemote)}, {}) == "another's");
}

TEST_CASE("an error that repeats a collective's is the collective's", "[strategy]") {
  const Failures failures;
  ReplicaContext replica;
  const auto same_words = error_with(std::runtime_error("autograd says: rank 1 is gone, really"));
  CHECK(failures.cause_of(same_words, replica) == same_words);
  replica.wait_error = error_with(CommError("rank 1 is gone"));
  CHECK(failures.cause_of(same_words, replica) == replica.wait_error);
  const auto other = error_with(std::runtime_error("something else"));
  CHECK(failures.cause_of(other, replica) == other);
}

}  // namespace muster
