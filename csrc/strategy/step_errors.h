// Errors that end a step, and what they leave of parameters and optimizer state.
#pragma once

#include <cstddef>
#include <cstdint>

#include "muster/parameters_after.h"
#include "strategy/parameter_sets.h"
#include "strategy/session.h"

namespace muster {

/// Where a step was when an error ended it.
struct StepPlace {
  int64_t step = 0;        ///< its number
  bool has_tail = false;   ///< it told the others of its window's end, so that they may go on and store
  bool in_update = false;  ///< of a flat optimizer
  size_t num_updated = 0;  ///< flat optimizers that were stepped in it
};

/// Owned by the thread that steps.
class StepErrors {
 public:
  StepErrors(Session& session, ParameterSets& sets) : session_(session), sets_(sets) {}

  /// In a handler: rethrows. A CommError says, in its text and to parameters_after(), whether parameters and state here
  /// are whole. Where the group that steps has ended, they are in memory of this process alone then.
  [[noreturn]] void rethrow(const StepPlace& place);

 private:
  bool has_ended(const comm::CommunicatorPtr& group) const;
  bool may_be_torn(const StepPlace& place) const;
  Parameters note_left(const StepPlace& place);

  Session& session_;
  ParameterSets& sets_;
  bool are_torn_ = false;  // the parameters, by an earlier error
};

}  // namespace muster
