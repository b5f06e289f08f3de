// The interpreter's exit, as threads see it.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <optional>

namespace muster {

/// Threads that will want the GIL stay inside until they have it. A thread that asks for the GIL once the interpreter
/// goes is ended by Python where it stands, which destructors on its stack turn into the end of the process.
/// Thread-safe.
class ExitGate {
 public:
  /// One thread's stay. False where the gate is closed: then it must not ask for the GIL if it can do without.
  class Visit {
   public:
    Visit() noexcept;
    ~Visit();
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;
    explicit operator bool() const noexcept { return is_inside_; }

   private:
    bool is_inside_ = false;
  };

  /// Blocks until nobody is inside, at most 5 s. Call without the GIL, which those inside may be waiting for.
  static void close() noexcept;
};

/// Releases the GIL while it lives; the interpreter's exit waits until its thread has the GIL again.
class WithoutGil {
 public:
  WithoutGil() = default;
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  ExitGate::Visit visit_;
  pybind11::gil_scoped_release release_;  // ends before the visit does
};

/// A call guard of functions that need no GIL.
using Release = pybind11::call_guard<WithoutGil>;

}  // namespace muster
