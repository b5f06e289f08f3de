// Thousands of bad days of a job of parameter servers, each from a seed: see support/simulation.h.
#include <ATen/Parallel.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "cpp/catch.h"
#include "support/simulation.h"

using namespace muster::testing;

namespace {

uint64_t number_from(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// On a processor of its own: the threads of a simulation take turns.
[[noreturn]] void run_share(uint64_t first, uint64_t end, uint64_t stride, unsigned processor, int to) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  at::set_num_threads(1);  // the pool's threads did not follow the fork
  cpu_set_t own;
  CPU_ZERO(&own);
  CPU_SET(processor, &own);
  ::sched_setaffinity(0, sizeof(own), &own);  // or anywhere
  for (uint64_t seed = first; seed < end; seed += stride) {
    const auto failure = simulate({seed});
    if (failure.empty()) continue;
    const auto written = ::write(to, failure.data(), failure.size());
    ::_exit(written < 0 ? 2 : 1);
  }
  ::_exit(0);
}

}  // namespace

// MUSTER_SEED=n runs that one alone and prints what happens; MUSTER_SEEDS says how many there are, MUSTER_FIRST_SEED
// the first.
TEST_CASE("no update is lost or doubled, and nobody waits for ever, on simulated bad days", "[server][simulation]") {
  if (std::getenv("MUSTER_SEED") != nullptr) {
    CHECK(simulate({number_from("MUSTER_SEED", 0), /*prints=*/true}) == "");
    return;
  }
  const uint64_t first = number_from("MUSTER_FIRST_SEED", 0);
  const uint64_t end = first + number_from("MUSTER_SEEDS", 10'000);
  const unsigned shares = std::clamp(std::thread::hardware_concurrency(), 1U, 16U);
  std::vector<pid_t> children;
  std::vector<int> results;
  for (unsigned share = 0; share < shares; ++share) {
    int ends[2];
    REQUIRE(::pipe(ends) == 0);
    const pid_t child = ::fork();
    REQUIRE(child >= 0);
    if (child == 0) run_share(first + share, end, shares, share, ends[1]);
    ::close(ends[1]);
    children.push_back(child);
    results.push_back(ends[0]);
  }
  std::string failures;
  for (unsigned share = 0; share < shares; ++share) {
    std::string text;
    char buffer[4096];
    for (ssize_t got = 0; (got = ::read(results[share], buffer, sizeof(buffer))) > 0;) text.append(buffer, got);
    ::close(results[share]);
    int status = 0;
    ::waitpid(children[share], &status, 0);
    CHECK(status == 0);
    failures += text;
  }
  CHECK(failures == "");
}
