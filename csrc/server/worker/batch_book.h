// The dealt batches of a worker, for a server 0 that started again and does not know of them.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "server/protocol/messages/batches.h"

namespace muster::server {

/// Externally synchronised.
class BatchBook {
 public:
  void note_dealt(const BatchId& batch) { held_.insert(batch); }
  /// They went into a step, or into none before `step`.
  void note_finished(const std::vector<BatchId>& batches, uint64_t step);
  /// The worker leaves a pass.
  void note_end(uint32_t loader, uint64_t epoch);
  /// Server 0 has everything up to `step` in snapshots.
  void release(uint64_t step);

  /// At most kMaxBatches each.
  std::vector<BatchId> held() const;
  std::vector<BatchId> finished() const;

 private:
  std::set<BatchId> held_;
  std::map<BatchId, uint64_t> finished_;  // in which step
};

}  // namespace muster::server
