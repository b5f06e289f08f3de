// Operations of a rank that await their turn beside those of a scope.
#pragma once

#include <cstdint>

namespace muster::comm {

/// Operations on one handle of a group, in an order that all ranks have, that may leave between those of a scope on
/// another handle: where both go to one stream of a device, all ranks have to issue them in one order, whichever is
/// ready first. Called by whoever issues the scope's operations. Does not throw: what is wrong with one is told
/// elsewhere.
class QueuedOperations {
 public:
  virtual ~QueuedOperations() = default;

  /// How many have left.
  virtual int64_t num_issued() const noexcept = 0;
  /// How many have left or could, up to the first one that could not.
  virtual int64_t num_ready() const noexcept = 0;
  /// Issues those that are ready, until `count` have left. Does not block.
  virtual void issue(int64_t count) noexcept = 0;
  /// Lets none leave from now on but by issue().
  virtual void hold() noexcept = 0;
  /// Issues what is ready, and from now on what becomes so: no operation of the scope follows on any rank.
  virtual void let_go() noexcept = 0;
};

}  // namespace muster::comm
