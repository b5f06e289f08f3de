// What a launcher has started, whether or not the program asks.
#pragma once

#include <optional>
#include <string>

#include "muster/cluster.h"

namespace muster {

struct Launched {
  std::string launcher;  ///< as Cluster::launcher
  int rank = 0;
  int num_workers = 1;
};

/// What the variables of a launcher say of this process; nothing where there is none, or they do not fit one another.
std::optional<Launched> find_launched(const Cluster::Environment& environment) noexcept;
/// Of the process's environment.
std::optional<Launched> find_launched() noexcept;

}  // namespace muster
