#include "support/simulation.h"

#include <cstdio>
#include <memory>

#include "core/log.h"
#include "support/message_names.h"
#include "support/simulated_world.h"

namespace muster::testing {

namespace {

using Time = World::Time;

// What happens to a job, from its seed.
class BadDay {
 public:
  BadDay(World& world, const SimulationOptions& options)
      : world_(world), is_rich_(options.is_rich), at_(world.begin()) {
    setup_.servers = static_cast<uint32_t>(1 + world_.pick(3));
    setup_.workers = static_cast<uint32_t>(1 + world_.pick(3));
    setup_.staleness = world_.chance(60)   ? 0
                       : world_.chance(50) ? server::kAnyStaleness
                                           : static_cast<uint32_t>(1 + world_.pick(3));
    setup_.replaces = world_.chance(60);
    faults_ = world_.pick(5);
    at_ += milliseconds(world_.pick(1'500));
    setup_.steps = 4 + world_.pick(24);
    setup_.is_spread = options.is_spread;
    setup_.begins_anew = options.begins_anew;
    setup_.is_thorough = setup_.joins_with_others = is_rich_;
    setup_.deals = is_rich_ && setup_.staleness != 0 && world_.chance(50);
  }

  void run() {
    world_.run(setup_, [this] {
      if (faults_ > 0 && world_.time() >= at_) fault();
    });
  }

 private:
  size_t any_server() { return world_.pick(setup_.servers); }
  milliseconds while_away() { return milliseconds(world_.chance(80) ? world_.pick(1'000) : world_.pick(6'000)); }

  void kill_worker(milliseconds for_how_long) {
    const auto workers = world_.alive();
    if (!workers.empty()) world_.kill_worker(*workers[world_.pick(workers.size())], for_how_long);
  }

  void kill_everything() {
    world_.say("everything is killed");
    for (auto* const life : world_.alive()) world_.kill_worker(*life, milliseconds(0));
    for (size_t s = 0; s < setup_.servers; ++s) world_.kill_server(s, milliseconds(world_.pick(300)));
  }

  void cut_off() {
    const auto rank = static_cast<uint32_t>(world_.pick(setup_.workers));
    std::optional<size_t> server;
    if (world_.chance(70)) server = any_server();
    const auto longest = world_.chance(70) ? 2'000 : 20'000;
    world_.cut_off(rank, server, milliseconds(200 + world_.pick(longest - 200)), world_.chance(50));
  }

  void fault() {
    --faults_;
    at_ = world_.time() + milliseconds(world_.pick(3) == 0 ? world_.pick(100) : world_.pick(3'000));
    if (is_rich_ && world_.chance(40)) return cut_off();
    switch (world_.pick(8)) {
      case 0:
      case 1:
        return kill_worker(milliseconds(world_.pick(1'500)));
      case 2:
      case 3:
        return world_.kill_server(any_server(), while_away());
      case 4:
        world_.kill_server(any_server(), while_away());
        return kill_worker(milliseconds(world_.pick(1'500)));
      case 5:
        return kill_everything();
      case 6: {  // a snapshot is damaged while its server is down
        const size_t s = any_server();
        world_.kill_server(s, milliseconds(world_.pick(500)));
        world_.damage_newest(s);
        return;
      }
      default: {
        const size_t s = any_server();
        return world_.stand_still(s, milliseconds(world_.pick(20'000)));
      }
    }
  }

  World& world_;
  const bool is_rich_;
  JobSetup setup_;
  uint64_t faults_ = 0;
  Time at_;  // of the next one
};

template <class F>
std::string in_world(uint64_t seed, bool prints, const F& run) {
  set_log_sink([&](LogLevel, const std::string& message) {
    if (prints) std::fprintf(stderr, "      %s\n", message.c_str());
  });
  const auto world = std::make_shared<World>(seed, prints);
  run(*world);
  set_log_sink({});
  return world->failure();
}

}  // namespace

std::string simulate(const SimulationOptions& options) {
  const auto failure = in_world(options.seed, options.prints, [&](World& world) { BadDay(world, options).run(); });
  return failure.empty() ? failure : "seed " + std::to_string(options.seed) + ": " + failure;
}

std::string in_words(const Kill& kill) {
  using Moment = Kill::Moment;
  static constexpr const char* kMoments[] = {"sent", "held", "answered", "received", "begun", "renamed"};
  static constexpr const char* kVictims[] = {"a worker", "the chief", "server 0", "server 1", "all"};
  const bool is_snapshot = kill.moment == Moment::begun || kill.moment == Moment::renamed;
  const std::string which = " " + std::to_string(kill.occurrence);
  const std::string what = is_snapshot
                               ? "snapshot" + which + " of server " + std::to_string(kill.server)
                               : name_of_message(kill.request) + which + " to server " + std::to_string(kill.server);
  return what + ", " + kMoments[static_cast<size_t>(kill.moment)] + " x " + kVictims[static_cast<size_t>(kill.victim)];
}

KillOutcome simulate(const KillJob& job) {
  KillOutcome outcome;
  outcome.failure = in_world(job.seed, job.prints, [&](World& world) {
    world.expect(job.kill);
    JobSetup setup;
    setup.servers = setup.workers = 2;
    setup.staleness = job.is_synchronous ? 0 : server::kAnyStaleness;
    setup.steps = 8;
    setup.replaces = job.replaces;
    setup.is_thorough = setup.joins_with_others = true;
    world.run(setup, [] {});
    outcome.was_killed = world.was_killed();
    outcome.began_again = world.began_again();
  });
  return outcome;
}

}  // namespace muster::testing
