// The parameter servers of a job, as a worker knows them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "job/job_facts.h"
#include "muster/parameter_server.h"
#include "server/protocol/messages/batches.h"

namespace muster {

namespace server {
class ParameterServer;
}

/// A value; copies share the server that this process hosts.
struct ServerJob {
  std::vector<std::string> channels;              ///< by server: abstract Unix names
  uint64_t id = 0;                                ///< greater than that of any job before on these servers
  std::string token = {};                         ///< see server::Hello
  JobFacts facts = {};                            ///< but for row seeds, unless it joins
  bool joins = false;                             ///< this worker came to a job that others had begun
  uint32_t staleness = 0;                         ///< 0: synchronous; server::kAnyStaleness: asynchronous
  bool is_loaded = false;                         ///< the model's values are a checkpoint's
  std::vector<server::PassProgress> passes = {};  ///< from that, for the chief to start with
  ServerOptions options = {};
  std::shared_ptr<server::ParameterServer> embedded;  ///< where this process hosts one
  std::shared_ptr<const void> seat = {};              ///< this process's at servers of others, until close()
};

}  // namespace muster
