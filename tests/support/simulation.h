// A job of parameter servers whose time, connections, deaths and disks are simulated: the servers' logic and the
// workers' code are real, everything else follows from a seed, or from what is to happen when.
#pragma once

#include <cstdint>
#include <string>

namespace muster::testing {

struct SimulationOptions {
  uint64_t seed = 0;
  bool prints = false;  ///< the schedule, on stderr, as it goes
  /// Also partitions, a table, momentum, values that are read in every step, dealt batches, and workers that join with
  /// hyperparameters of their own.
  bool is_rich = false;
  bool begins_anew = false;  ///< where all workers are started again, their job has values of its own
  bool is_spread = false;  ///< every server has a part of the parameters, in several chunks; else the last one has all
};

/// What went wrong, and the schedule that led there; empty where all went well. Throws for a schedule that does not
/// end.
std::string simulate(const SimulationOptions& options);

/// One death, of somebody, of something, at a moment that is a request's or a snapshot's.
struct Kill {
  enum class Moment : uint8_t {
    sent,      ///< the request is sent, and its server has not looked at it
    held,      ///< its server has taken it up, and waits for others before it answers
    answered,  ///< the answer is sent, and lost
    received,  ///< the answer has arrived
    begun,     ///< the server begins to write a snapshot
    renamed    ///< the snapshot is there, and nobody knows of it
  };
  /// `worker`: not the chief.
  enum class Victim : uint8_t { worker, chief, server_0, server_1, all };

  Moment moment = Moment::sent;
  Victim victim = Victim::worker;
  uint16_t request = 0;     ///< its type; for snapshots unused
  uint32_t server = 0;      ///< whose request or snapshot
  uint64_t occurrence = 1;  ///< which one
  bool is_own = true;       ///< where the victim is a worker: of its requests; else of anybody's
};

/// "Commit, the 3rd to server 0, sent x the chief"
std::string in_words(const Kill& kill);

/// A job of two workers and two servers, a launcher, and one death.
struct KillJob {
  Kill kill;
  bool is_synchronous = true;  ///< else each worker steps on its own
  bool replaces = false;       ///< the launcher replaces a worker that dies; else it starts all workers again
  uint64_t seed = 0;           ///< of the order in which things happen
  bool prints = false;
};

struct KillOutcome {
  std::string failure;       ///< as of simulate()
  bool was_killed = false;   ///< false: the request never came
  bool began_again = false;  ///< the launcher started all workers again
};

KillOutcome simulate(const KillJob& job);

}  // namespace muster::testing
