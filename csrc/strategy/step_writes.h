// Writes to parameters in a step or run.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <string>
#include <vector>

#include "core/write_trace.h"
#include "window/parameter_registry.h"

namespace muster {

/// The function of a step or run is called for each of a process's replicas: what it writes to parameters in memory
/// that they share, it would write as often, while others read there. What it writes on one worker, others may not.
/// Lives shorter than the registry.
class StepWrites {
 public:
  /// Before a step or run on replicas of these devices; `are_compared`: by workers. By the thread that steps.
  StepWrites(const ParameterRegistry& registry, const std::vector<c10::Device>& devices, bool are_compared);

  /// After a replica's part of `call`, "the step" say, by the replica's thread. Throws InvalidArgument where replicas
  /// share memory, for a parameter that was written since it began, unless forward is known to
  /// (ParameterRegistry::expect_writes). `may_stay`: a write of the values that were there, as broadcast() makes, is
  /// none.
  void check(const std::string& call, bool may_stay) const;

  /// Parameters that were, before anything is stepped; none where nobody compares them.
  std::vector<size_t> written() const;

 private:
  /// `in_place`: replaced memory does not count.
  bool was_written(size_t parameter, bool in_place) const;

  const ParameterRegistry& registry_;
  const bool is_shared_;  // by replicas
  const bool are_compared_;
  std::vector<WriteTrace> before_;  // by parameter; empty where nobody asks
};

}  // namespace muster
