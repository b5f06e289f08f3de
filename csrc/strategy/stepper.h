// The calls of a strategy: step, flush and run, over windows of micro-batches.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "strategy/parameter_sets.h"
#include "strategy/replica_calls.h"
#include "strategy/session.h"
#include "strategy/sigterm.h"
#include "strategy/step_call.h"
#include "strategy/step_errors.h"
#include "strategy/updates.h"
#include "window/skip_limit.h"

namespace muster {

/// Owned by the thread that prepares and steps; stop() and stopping() are thread-safe. step, run and flush throw
/// InvalidArgument where another thread is in one of them.
class Stepper {
 public:
  Stepper(Session& session, ParameterSets& sets);

  /// Collective over workers at a window's end, local otherwise. Errors of the step itself leave the strategy usable.
  /// After others of the group that steps, parameters and optimizer state are in memory of this process alone, and what
  /// is a CommError is known to parameters_after().
  StepResult step(const StepCall& call);
  /// Closes the open window of every set; empty when none is open. `updates`: for each of ParameterSets::open() a call
  /// that has its optimizers and functions.
  std::optional<StepResult> flush(const std::vector<StepCall>& updates, bool drop_incomplete);
  /// Calls `call` on every local replica with a non-empty part, without gradients and with the call's random stream.
  void run(const StepCall& call);

  /// After ParameterSets::connect_servers, in a worker that joined a synchronous job: takes part in the others' windows
  /// with nothing of its own until it knows what they do, and goes on with their count of steps. Returns what
  /// describe_passes gave there. No-op elsewhere. `update`: a call that has the set's optimizers and functions.
  std::string watch(const StepCall& update);
  /// `describe` tells of the passes over loaders, for a worker that joined; called in step and flush.
  void describe_passes(std::function<std::string()> describe) { describe_passes_ = std::move(describe); }

  /// Windows that were closed and not dropped.
  int64_t steps() const noexcept { return steps_; }
  /// The model's values are a checkpoint's. Goes on after as many windows, and calls of step, run and flush, as a job
  /// before this one has made, with its seed. Throws InvalidArgument in a call, and where a window is open.
  void go_on_after(int64_t steps, uint64_t calls, uint64_t seed);
  /// Whether the last gradients came from a step, which has applied them.
  bool gradients_are_applied() const noexcept { return gradients_are_applied_; }

  Updates& updates() noexcept { return updates_; }
  /// Of the running call.
  ReplicaCalls& replicas() noexcept { return replicas_; }

  /// Requests the end of training: `stopping()` turns true on all ranks at the same window's end.
  void stop() noexcept { stop_requested_ = true; }
  /// Tells SIGTERM that somebody looks; see sigterm.h.
  bool stopping() const noexcept {
    SigtermWatch::note_look();
    return stopping_;
  }

 private:
  StepResult step_set(ParameterSet& set, const StepCall& call);
  void prepare_report(ParameterSet& set, uint64_t calls);
  void fail_set(ParameterSet& set, const StepCall& call, bool closing, bool dropping,
                const std::vector<ReplicaRun>& outcomes, const std::exception_ptr& interrupt);
  void doubt(const std::vector<size_t>& parameters);
  StepCall empty_call(const StepCall& update) const;
  void note_times(const StepCall& call, const std::vector<ReplicaRun>& outcomes);
  StepResult end_window(ParameterSet& set, const StepCall& call);
  StepResult open_result(ParameterSet& set) const;

  Session& session_;
  ParameterSets& sets_;
  ReplicaCalls replicas_;
  StepErrors errors_;
  Updates updates_;
  SkipLimit skip_limit_;
  std::function<std::string()> describe_passes_;
  std::map<int, std::vector<size_t>> written_;  // by set: parameters that steps of its open window wrote
  int64_t steps_ = 0;
  bool gradients_are_applied_ = false;
  bool has_tail_ = false;  // of the running step: others may go on to store
  std::atomic<bool> stop_requested_{false};
  std::atomic<bool> stopping_{false};
};

}  // namespace muster
