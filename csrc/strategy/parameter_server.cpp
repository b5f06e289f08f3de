#include "muster/parameter_server.h"

#include "muster/error.h"
#include "strategy/build.h"

namespace muster {

void ServerOptions::validate() const {
  const int steps = staleness.value_or(0);
  if (steps >= 0) return;
  throw InvalidArgument("staleness=" + std::to_string(steps) +
                        ": it counts steps; 0 is synchronous, and none at all asynchronous");
}

ParameterServerStrategy::ParameterServerStrategy(const Cluster& cluster, const ServerOptions& server_options,
                                                 const StrategyOptions& options)
    : Strategy(make_parameter_server(cluster, server_options, options, ReplicaThreads::own),
               "ParameterServerStrategy") {}

}  // namespace muster
