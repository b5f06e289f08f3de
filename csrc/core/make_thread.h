// Threads, and the error of a machine that gives no more of them.
#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "muster/error.h"

namespace muster {

/// A thread that runs `function`. Throws an Error of type E where the system gives none; `purpose` says what it was
/// for, as in "cannot make the thread that <purpose>".
template <class E = CommError, class F>
std::thread make_thread(const std::string& purpose, F function) {
  try {
    return std::thread(std::move(function));
  } catch (const std::system_error& error) {
    throw E("cannot make the thread that " + purpose + ": " + error.code().message() +
            "; allow more threads (ulimit -u, or the container's pids.max)");
  }
}

}  // namespace muster
