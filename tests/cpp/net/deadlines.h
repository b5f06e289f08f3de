// Deadlines of tests.
#pragma once

#include <chrono>

#include "net/unix_socket.h"

namespace muster::testing {

inline net::Deadline in(int ms) { return std::chrono::steady_clock::now() + std::chrono::milliseconds(ms); }

}  // namespace muster::testing
