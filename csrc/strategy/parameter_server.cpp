#include "muster/parameter_server.h"

#include "muster/error.h"
#include "strategy/build.h"

namespace muster {

void ServerOptions::validate() const {
  if (staleness.value_or(0) >= 0) return;
  throw InvalidArgument("staleness=" + std::to_string(*staleness) +
                        ": it counts steps; 0 is synchronous, and none at all asynchronous");
}

ParameterServerStrategy::ParameterServerStrategy(const Cluster& cluster, const ServerOptions& server_options,
                                                 const StrategyOptions& options)
    : Strategy(make_parameter_server(cluster, server_options, options, ReplicaThreads::own),
               "ParameterServerStrategy") {}

}  // namespace muster
