// A group that tells somebody of its collectives.
#pragma once

#include <functional>

#include "comm/communicator.h"

namespace muster::comm {

/// `group`, which calls `note` after each collective that it has issued; not after what begins or ends a scope.
CommunicatorPtr make_noting(CommunicatorPtr group, std::function<void()> note);

}  // namespace muster::comm
