// Thousands of bad days of a job of parameter servers, each from a seed: see support/simulation.h.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "cpp/catch.h"
#include "support/shares.h"
#include "support/simulation.h"

using namespace muster::testing;

namespace {

uint64_t number_from(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// Of days whose variables begin with `prefix`: prefix + SEED = n runs that one alone and prints what happens; SEEDS
// says how many there are, FIRST_SEED the first.
void run_days(const std::string& prefix, uint64_t count, SimulationOptions options) {
  const auto name = [&](const char* rest) { return prefix + rest; };
  const auto run = [&](uint64_t seed) {
    options.seed = seed;
    return simulate(options);
  };
  if (std::getenv(name("SEED").c_str()) != nullptr) {
    options.prints = true;
    CHECK(run(number_from(name("SEED").c_str(), 0)) == "");
    return;
  }
  const uint64_t first = number_from(name("FIRST_SEED").c_str(), 0);
  const uint64_t end = first + number_from(name("SEEDS").c_str(), count);
  CHECK(run_in_shares(first, end, run, /*stops=*/true) == "");
}

}  // namespace

// MUSTER_SEED, MUSTER_SEEDS and MUSTER_FIRST_SEED are about these.
TEST_CASE("no update is lost or doubled, and nobody waits for ever, on simulated bad days", "[server][simulation]") {
  run_days("MUSTER_", 10'000, {});
}

// MUSTER_SPREAD_SEED and so on about these.
TEST_CASE("bad days end as well where every server has a part of the parameters", "[server][simulation]") {
  run_days("MUSTER_SPREAD_", 2'000, {.is_spread = true});
}

// MUSTER_ANEW_SEED and so on about these.
TEST_CASE("on bad days, too, a job that has loaded a checkpoint has its values alone", "[server][simulation]") {
  run_days("MUSTER_ANEW_", 1'000, {.begins_anew = true, .is_spread = true});
}

TEST_CASE("simulated days that once ended badly end well", "[server][simulation]") {
  for (const uint64_t seed : {21372,  52441,  61999,  65854,  71702,  71905,  74749,  76603,  87126,  90466,  92357,
                              100104, 100105, 111644, 174214, 181041, 199197, 258665, 263813, 342737, 344236, 785702}) {
    CHECK(simulate(SimulationOptions{.seed = seed}) == "");
  }
  for (const uint64_t seed : {5300, 202921}) CHECK(simulate(SimulationOptions{.seed = seed, .is_spread = true}) == "");
  for (const uint64_t seed : {110, 157, 738, 760471})
    CHECK(simulate(SimulationOptions{.seed = seed, .is_rich = true}) == "");
}

// MUSTER_RICH_SEED and so on about these.
TEST_CASE("on bad days with partitions, tables, batches and joiners every step is what its members make",
          "[server][simulation]") {
  run_days("MUSTER_RICH_", 500, {.is_rich = true});
}
