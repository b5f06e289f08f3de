// Every request of a job, and every moment of a snapshot, as the one at which somebody dies: see Kill. The job must end
// as if nobody had, or the launcher be told within seconds who lacks what, and the job that it starts again must.
#include <cstdlib>
#include <set>
#include <string>
#include <vector>

#include "cpp/catch.h"
#include "server/protocol/protocol.h"
#include "support/shares.h"
#include "support/simulation.h"

using namespace muster::testing;
using namespace muster::server;

namespace {

using Moment = Kill::Moment;
using Victim = Kill::Victim;

struct Row {
  std::string name;
  uint16_t request;
  std::vector<Moment> moments;
  std::vector<uint64_t> occurrences;
  std::vector<uint32_t> servers = {0, 1};
  bool is_of_synchronous_jobs = false;  // alone
  bool is_of_chief = false;             // alone
};

const std::vector<Moment> kOfRequest{Moment::sent, Moment::held, Moment::answered};

std::vector<Row> rows() {
  return {
      {"Configure", Configure::kType, kOfRequest, {1, 2}},
      {"Write", Write::kType, kOfRequest, {1, 2}, {0, 1}, false, true},
      {"Start", Start::kType, kOfRequest, {1}, {0, 1}, false, true},
      {"Join", Join::kType, kOfRequest, {1, 2}},
      {"Push", Push::kType, kOfRequest, {1, 9}},
      {"PushRows", PushRows::kType, kOfRequest, {1, 7}},
      {"Commit", Commit::kType, {Moment::sent, Moment::held}, {1, 5}, {0}},
      {"Decision", Commit::kType, {Moment::answered, Moment::received}, {1, 5}, {0}},
      {"Sum", Sum::kType, kOfRequest, {1, 5}, {0, 1}, true},
      {"Apply", Apply::kType, kOfRequest, {1, 5}},
      {"Read", Read::kType, kOfRequest, {1, 9}},
      {"PullRows", PullRows::kType, kOfRequest, {1, 5}},
      {"snapshot begun", 0, {Moment::begun}, {1, 2, 3}},
      {"snapshot renamed", 0, {Moment::renamed}, {1, 2, 3}},
      {"Leave", Leave::kType, kOfRequest, {1, 2}},
  };
}

struct Case {
  std::string pair;
  KillJob job;
};

std::vector<Case> cases_of(const Row& row) {
  constexpr Victim kVictims[] = {Victim::worker, Victim::chief, Victim::server_0, Victim::server_1, Victim::all};
  static const char* const kNames[] = {"a worker", "the chief", "server 0", "server 1", "all at once"};
  std::vector<Case> cases;
  for (const Victim victim : kVictims) {
    const std::string pair = row.name + " x " + kNames[static_cast<size_t>(victim)];
    for (const Moment moment : row.moments) {
      for (const uint32_t server : row.servers) {
        for (const uint64_t occurrence : row.occurrences) {
          for (const bool is_synchronous : {true, false}) {
            if (!is_synchronous && row.is_of_synchronous_jobs) continue;
            for (const bool replaces : {false, true}) {
              KillJob job;
              job.kill = {moment, victim, row.request, server, occurrence, !row.is_of_chief};
              job.is_synchronous = is_synchronous;
              job.replaces = replaces;
              cases.push_back({pair, job});
            }
          }
        }
      }
    }
  }
  return cases;
}

std::string in_words(const KillJob& job) {
  return in_words(job.kill) + (job.is_synchronous ? ", synchronous" : ", with staleness") +
         (job.replaces ? ", who dies is replaced" : ", all are started again");
}

}  // namespace

// MUSTER_KILL=n runs that case alone and prints what happens; MUSTER_SEEDS says in how many orders each is run.
TEST_CASE("whoever dies at whichever request, the job ends as if nobody had", "[server][kills]") {
  std::vector<Case> cases;
  std::set<std::string> lacking;
  for (const auto& row : rows()) {
    for (auto& each : cases_of(row)) {
      lacking.insert(each.pair);
      cases.push_back(std::move(each));
    }
  }
  if (const char* const number = std::getenv("MUSTER_KILL")) {
    auto job = cases.at(std::strtoull(number, nullptr, 10)).job;
    job.prints = true;
    CHECK(simulate(job).failure == "");
    return;
  }
  const char* const seeds = std::getenv("MUSTER_SEEDS");
  const uint64_t orders = seeds == nullptr ? 1 : std::strtoull(seeds, nullptr, 10);
  const auto text = run_in_shares(
      0, cases.size() * orders,
      [&](uint64_t i) {
        const uint64_t number = i % cases.size();
        auto job = cases[number].job;
        job.seed = i / cases.size();
        const auto outcome = simulate(job);
        if (!outcome.failure.empty()) {
          return "WRONG: case " + std::to_string(number) + ", order " + std::to_string(job.seed) + ", " +
                 cases[number].pair + ": " + in_words(job) + ": " + outcome.failure;
        }
        if (!outcome.was_killed) return std::string();
        return (outcome.began_again ? "again: " : "went on: ") + cases[number].pair + "\n";
      },
      /*stops=*/false);
  size_t deaths = 0;
  size_t began_again = 0;
  std::string failures;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    const auto line = text.substr(begin, end - begin);
    begin = end + 1;
    const bool is_again = line.starts_with("again: ");
    if (is_again || line.starts_with("went on: ")) {
      lacking.erase(line.substr(line.find(": ") + 2));
      ++deaths;
      began_again += is_again ? 1 : 0;
    } else {
      failures += line + "\n";
    }
  }
  CHECK(failures == "");
  CHECK(lacking == std::set<std::string>());
  UNSCOPED_INFO(cases.size() << " cases, " << deaths << " deaths, " << began_again << " jobs began again");
  CHECK(deaths > cases.size() / 2 * orders);
  if (std::getenv("MUSTER_SEEDS") != nullptr) WARN(deaths << " deaths, " << began_again << " jobs began again");
}
