// Connections of this process, which tests cut.
#pragma once

#include <set>

namespace muster::testing {

/// Descriptors of all sockets, but for those that listen.
std::set<int> connections();

/// Ends both directions of a connection; whoever uses it finds out.
void cut(int connection);

}  // namespace muster::testing
