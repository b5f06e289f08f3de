#include "muster/parameter_server.h"

#include <string>

#include "muster/error.h"
#include "strategy/build.h"

namespace muster {

void ServerOptions::validate() const {
  const int steps = staleness.value_or(0);
  if (steps < 0) {
    throw InvalidArgument("staleness=" + std::to_string(steps) +
                          ": it counts steps; 0 is synchronous, and none at all asynchronous");
  }
  if (log_bytes && *log_bytes < 0) {
    throw InvalidArgument("log_bytes=" + std::to_string(*log_bytes) +
                          ": it counts bytes; leave it out for the default");
  }
  const auto check_seconds = [](const char* name, double seconds) {
    constexpr double kLeast = 1e-2;  // of a server's plan
    constexpr double kDay = 86'400;
    if (seconds >= kLeast && seconds <= kDay) return;
    throw InvalidArgument(std::string(name) + "=" + std::to_string(seconds) + ": it counts seconds, from 0.01 up to " +
                          std::to_string(static_cast<int>(kDay)));
  };
  check_seconds("patience", patience);
  check_seconds("heartbeat", heartbeat);
}

ParameterServerStrategy::ParameterServerStrategy(const Cluster& cluster, const ServerOptions& server_options,
                                                 const StrategyOptions& options)
    : ParameterServerStrategy(cluster, {}, server_options, options) {}

ParameterServerStrategy::ParameterServerStrategy(const Cluster& cluster, const std::vector<std::string>& devices,
                                                 const ServerOptions& server_options, const StrategyOptions& options)
    : Strategy(make_parameter_server(cluster, devices, server_options, options, ReplicaThreads::own),
               "ParameterServerStrategy") {}

}  // namespace muster
