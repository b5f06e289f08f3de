// Scripts: what ranks remember of scopes, so that they can issue the operations of the next one without asking.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "comm/communicator.h"
#include "comm/request.h"

namespace muster::comm::nccl {

/// An operation of a scope, the same on all ranks: no scope's number, and of a gather of any sizes no sizes.
struct Line {
  Request request;
  bool meets = false;  ///< ranks ask one another before it

  /// Whether both ask for the same.
  bool asks_for(const Line& other) const noexcept;
};
Line line_of(const Request& request, GatherSizes sizes);

/// The operations of a scope that every rank took part in.
struct Script {
  bool has_queue = false;
  std::vector<Line> lines;
  uint64_t digest = 0;  ///< once it was learned: not 0, and the same where scripts are

  bool begins_as(bool queued, const Line& first) const noexcept;
};

/// The scripts of the last scopes, one for each beginning: a training step has another one than an evaluation.
class Scripts {
 public:
  /// Null where the last two scopes that began so were not alike; where a program varies, it is not guessed at.
  std::shared_ptr<const Script> find(bool has_queue, const Line& first) noexcept;
  /// Takes the place of the one that began alike, or of the oldest.
  void learn(Script script);
  /// The script was followed: it outlives others.
  void keep(const Script& script) noexcept;
  void forget(const Script& script) noexcept;

 private:
  struct Known {
    std::shared_ptr<const Script> script;
    bool was_repeated = false;
  };
  std::deque<Known>::iterator place_of(bool has_queue, const Line& first) noexcept;

  std::deque<Known> known_;  // latest first
};

}  // namespace muster::comm::nccl
