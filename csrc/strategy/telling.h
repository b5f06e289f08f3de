// What goes wrong on one worker is thrown on all.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace muster {

/// What `act` gives on all workers, by rank; each calls it in its call of `what`. Where it throws on any, all throw:
/// the own error, or a CheckpointError, or LayoutMismatch where that was one, naming the other rank. Collective.
std::vector<std::string> told_by_all(comm::Communicator& workers, const char* what,
                                     const std::function<std::string()>& act);

}  // namespace muster
