// The updates at windows' ends: hooks before them, the steps of optimizers, and windows without any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <unordered_map>
#include <vector>

#include "core/write_trace.h"
#include "strategy/parameter_sets.h"
#include "strategy/session.h"
#include "strategy/step_call.h"
#include "strategy/step_errors.h"

namespace muster {

/// Owned by the thread that steps.
class Updates {
 public:
  Updates(Session& session, ParameterSets& sets, StepErrors& errors)
      : session_(session), sets_(sets), errors_(errors) {}

  /// A step begins, at whose end peers wait for this rank's part in the steps of so many flat optimizers.
  void expect(size_t awaited) noexcept { awaited_ = awaited; }

  /// Makes the update of a window that was not skipped; `step`: its number. Collective over workers where optimizers
  /// are hooked or steps divided.
  void make(ParameterSet& set, const StepCall& call, int64_t step);

  /// Whether the window that make() was called for last was dropped, by hooks or before anything was stepped.
  bool was_dropped() const noexcept { return was_dropped_; }

  /// Within the update of a set that is hooked, before the optimizers' steps; collective over workers. Calls this
  /// rank's `hooks`, which see and may edit the means (Window::leave_means) where the set is `fused` and keeps
  /// gradients, and waits for the other ranks' before anybody writes parameters. Where the hooks of a rank raised no
  /// rank steps: there the error is rethrown, elsewhere it is RemoteError, and the window counts as dropped, unless
  /// optimizers have stepped before these hooks' (not `is_first`). On parameter servers the step is made, and the error
  /// rethrown after it.
  void call_hooks(int set, bool fused, bool is_first, const std::function<void()>& hooks);

  /// How many flat optimizers stepped in a set's windows so far, each time one did: after a call that throws, too, it
  /// tells whose state there is more of.
  uint64_t count(int set) const;

 private:
  void step_flat(ParameterSet& set, const StepCall& call, int64_t step);
  std::exception_ptr agree_on_hooks(const Failure& failure, bool is_first, kernels::StepScalars* scalars) const;
  void fail_peers();
  void note_no_optimizer(int set);

  Session& session_;
  ParameterSets& sets_;
  StepErrors& errors_;
  // Of the flat optimizers in the window that is being updated:
  size_t awaited_ = 0;  // peers wait until this worker has stepped them
  size_t begun_ = 0;    // their step began here
  size_t stepped_ = 0;  // their step ended here
  bool was_dropped_ = false;
  std::exception_ptr hook_error_;             // to be rethrown after the step
  std::unordered_map<int, uint64_t> counts_;  // by set
  bool warned_of_no_optimizer_ = false;
  std::unordered_map<int, std::vector<WriteTrace>> traces_without_optimizer_;  // by set, at its last window's end
};

}  // namespace muster
