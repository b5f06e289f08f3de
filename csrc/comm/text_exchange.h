// Texts and small records that ranks show each other: descriptions to compare, errors, metrics.
#pragma once

#include <string>
#include <vector>

#include "comm/communicator.h"

namespace muster {

/// Collective. Every rank's text, by rank; a rank that sits the scope out gives an empty one.
std::vector<std::string> exchange_texts(comm::Communicator& communicator, const std::string& text);

}  // namespace muster
