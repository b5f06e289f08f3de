// Failures of replicas: what an error means to other ranks, in words that travel, and which of several is raised.
#pragma once

#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "core/replica_context.h"
#include "strategy/replica_run.h"
#include "window/outcome.h"

namespace muster {

/// Gives an error's words for other ranks; the Python layer knows Python exceptions.
using ErrorDescriber = std::function<Failure(const std::exception_ptr&)>;
Failure describe_cpp_error(const std::exception_ptr& error);

/// Called on a replica's thread with what ended its step: gives what can be kept and rethrown on another thread.
using ErrorCapturer = std::function<std::exception_ptr(std::exception_ptr)>;

/// Whether peers find out about an error by themselves: of a lost or late peer, and of a mismatch.
bool peers_know(const std::exception_ptr& error);

/// Describes errors as the language layer does. Handlers are set before replicas run; the rest is thread-safe.
class Failures {
 public:
  void set_handlers(ErrorDescriber describer, ErrorCapturer capturer);

  Failure describe(const std::exception_ptr& error) const { return describe_(error); }
  std::exception_ptr capture(std::exception_ptr error) const { return capture_(std::move(error)); }

  /// Whether there is an error, of this kind.
  bool is(const std::exception_ptr& error, Failure::Kind kind) const { return error && describe_(error).kind == kind; }

  /// The error of a collective that `error` repeats: torch's Python bindings turn one that backward waits for into a
  /// RuntimeError of the same words. Else `error`.
  std::exception_ptr cause_of(std::exception_ptr error, const ReplicaContext& replica) const;

  /// Rethrows what ended a call: a local replica's own error, a broken transport, RemoteError for one of `told` (that
  /// of another rank than `rank` first), or the consequence of another replica's failure. Returns where nothing failed.
  void raise(const std::vector<ReplicaRun>& outcomes, const std::vector<WindowSums::Failed>& told, int rank) const;

 private:
  ErrorDescriber describe_ = describe_cpp_error;
  ErrorCapturer capture_ = [](std::exception_ptr error) { return error; };
};

}  // namespace muster
