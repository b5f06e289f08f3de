// When the servers of a synchronous job keep snapshots, all of one step: a job whose processes all died goes on from
// it.
#pragma once

#include <chrono>
#include <cstdint>

#include "server/protocol/protocol.h"

namespace muster::server {

/// Server 0's business: it cuts a step when it decides it. Logic alone: time is an argument. Externally synchronised.
class CutSchedule {
 public:
  using Time = std::chrono::steady_clock::time_point;

  /// A cut is due `every` so often.
  void configure(std::chrono::milliseconds every, Time now);
  /// All servers hold what came of `step`, and nothing of later ones.
  void begin_at(uint64_t step);

  /// A cut is wanted sooner; it comes when as much time has passed since the last one was complete as that took.
  void want() noexcept { is_wanted_ = true; }
  /// A worker's log fills: the next step is cut. Who asks during a cut asks again after it, if that did not help.
  void hurry() noexcept { is_urgent_ = true; }
  /// The next step is cut, whatever was before: a worker goes on only after that.
  void demand() noexcept { is_demanded_ = true; }

  /// All servers have the snapshot of this step, or a later one.
  void note_complete(uint64_t step, Time now);

  /// Of a step that is decided now. No cut begins before the last one is complete.
  Cut decide(uint64_t step, Time now);

 private:
  std::chrono::steady_clock::duration every_{};
  std::chrono::steady_clock::duration took_{};  // the last one
  Time begun_{};
  Time ended_{};
  uint64_t last_ = 0;      // the step that was cut last
  uint64_t complete_ = 0;  // the last step that all servers have
  uint64_t before_ = 0;    // the one before
  bool is_wanted_ = false;
  bool is_urgent_ = false;
  bool is_demanded_ = false;
};

}  // namespace muster::server
