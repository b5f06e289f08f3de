// A job of parameter servers whose time, connections, deaths and disks are simulated: the servers' logic and the
// workers' code are real, everything else follows from a seed.
#pragma once

#include <cstdint>
#include <string>

namespace muster::testing {

struct SimulationOptions {
  uint64_t seed = 0;
  bool prints = false;  ///< the schedule, on stderr, as it goes
};

/// What went wrong, and the schedule that led there; empty where all went well. Throws for a schedule that does not
/// end.
std::string simulate(const SimulationOptions& options);

}  // namespace muster::testing
