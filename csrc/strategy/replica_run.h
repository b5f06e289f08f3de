// The outcome of one replica's part in a call.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstddef>
#include <exception>
#include <memory>
#include <vector>

#include "device/part_timer.h"

namespace muster {

/// Written by the replica's thread, read when the call's replicas have ended.
struct ReplicaRun {
  std::exception_ptr error;      ///< the step's own
  std::exception_ptr transport;  ///< communication broke: nothing can be agreed any more
  c10::IValue output;
  std::shared_ptr<const PartTimer> timer;  ///< null where parts are not timed
  std::vector<size_t> written;             ///< parameters that the step wrote, see StepWrites; of local replica 0
};

}  // namespace muster
