// Calls that Ctrl-C ends.
#pragma once

#include "bindings/bindings.h"
#include "core/wait_hook.h"

namespace muster {

inline void check_signals() {
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
}

/// A call guard: releases the GIL; waits inside the call end with what a signal handler raises.
struct Interruptible {
  Interruptible() : hook(check_signals) {}
  WithoutGil without_gil;
  WaitHook hook;
};

}  // namespace muster
