// What a worker tells its end of the parameter servers.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "server/protocol/plan.h"
#include "server/worker/surroundings.h"

namespace muster::server {

/// How long a server may be gone, unless something else is said.
inline constexpr std::chrono::milliseconds kPatience{5'000};
/// How long at least one may say nothing whose process listens at its address.
inline constexpr std::chrono::milliseconds kStandstillPatience{30'000};

struct ClientConfig {
  std::vector<std::string> servers;  ///< abstract Unix names, in the order of all workers
  uint32_t rank = 0;
  Plan plan;                                 ///< servers: their number
  uint64_t job = 0;                          ///< greater than that of any job before on the same servers, or equal
  std::string facts = {};                    ///< for Standing
  std::string token = {};                    ///< see Hello
  bool takes_over = false;                   ///< likewise
  bool joins = false;                        ///< the job runs already
  bool begins_anew = false;                  ///< what an earlier job trained is given up: the chief writes other values
  uint32_t lanes = 2;                        ///< connections to each server for chunks
  bool shares_memory = true;                 ///< large payloads stay in memory that servers map; else they travel
  uint64_t log_bytes = uint64_t{256} << 20;  ///< of pushes that are kept until they are durable, at most
  std::chrono::milliseconds patience = kPatience;
  std::shared_ptr<Surroundings> surroundings = Surroundings::of_process();  ///< never null
};

}  // namespace muster::server
