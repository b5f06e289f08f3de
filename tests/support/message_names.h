// Messages in words, for who reads a test's output.
#pragma once

#include <cstdint>
#include <string>

#include "net/frame.h"

namespace muster::testing {

/// "Commit"
std::string name_of_message(uint16_t type);

/// "Commit of step 19", for a request that the protocol allows.
std::string in_words(const net::Frame& request);

}  // namespace muster::testing
