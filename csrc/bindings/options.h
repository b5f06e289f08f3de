// A strategy's options on their way from Python.
#pragma once

#include "bindings/bindings.h"
#include "muster/options.h"

namespace muster {

/// `given`: the fields of muster.StrategyOptions by name. Throws InvalidArgument for a name or a value that is not one
/// of theirs.
StrategyOptions options_of(const pybind11::dict& given);

}  // namespace muster
