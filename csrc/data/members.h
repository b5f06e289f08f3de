// The workers of a job on parameter servers, as a pass over a loader knows them.
#pragma once

#include <cstdint>
#include <vector>

#include "server/protocol/protocol.h"

namespace muster::detail {

/// Owned by the thread that iterates and steps.
class Members {
 public:
  virtual ~Members() = default;

  /// The ranks that are expected in the next step, ascending; equal on all workers between any two steps.
  virtual std::vector<uint32_t> expected() = 0;
  /// Asks servers for the next batch of a pass of `batches`; `finished` are those that this worker was dealt and is
  /// through with. See ServerClient::deal.
  virtual server::Dealt deal(const server::PassId& pass, uint64_t batches, std::vector<uint64_t> finished) = 0;
  /// Gives back what this worker was dealt and has not finished.
  virtual void end_pass(const server::PassId& pass, uint64_t batches, std::vector<uint64_t> finished) = 0;
};

}  // namespace muster::detail
