// Exceptions that one Python thread raises in another.
#pragma once

#include "bindings/bindings.h"

namespace muster {

/// Raises `exception`, a class, in the Python thread of that identity at its next bytecode; None withdraws one that it
/// has not come to. Returns how many threads there are of it: 1 or 0. Needs the GIL; with None also raises what a
/// signal handler raises meanwhile.
int interrupt_thread(unsigned long identity, const pybind11::object& exception);

}  // namespace muster
