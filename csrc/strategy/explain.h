// A strategy in plain words.
#pragma once

#include <string>

#include "strategy/session.h"

namespace muster {

/// Who takes part, and what was chosen and why; a line a subject. `name`: the strategy's.
std::string explain(Session& session, const std::string& name);

}  // namespace muster
