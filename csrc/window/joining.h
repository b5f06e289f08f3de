// How a worker joins a synchronous job of parameter servers that others have begun.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "kernels/kernels.h"
#include "server/protocol/protocol.h"

namespace muster {

/// What a member of the job tells one that joins. A value: as things were before the window whose record carries it,
/// but for `passes`, which know its batches.
struct JoinReport {
  uint64_t since = 0;  ///< the step after which the worker that tells came in
  double unit = 1;     ///< of weights
  double loss_scale = 1;
  uint32_t growth_tracker = 0;  ///< of the loss scale
  uint64_t steps = 0;           ///< windows closed
  uint64_t calls = 0;           ///< t of the random streams, in the window's last call
  std::string passes;           ///< over loaders, in the words of the language layer

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.since);
    w.number(m.unit);
    w.number(m.loss_scale);
    w.number(m.growth_tracker);
    w.number(m.steps);
    w.number(m.calls);
    w.text(m.passes, server::kMaxRecord);
  }
};

/// A worker's state between connecting and taking part. A worker that joins closes empty windows with the others: its
/// records ask for reports, it takes the buffers that a window's end makes equal, and after a later window that was
/// stepped it has a report of the same moment. Owned by the stepping thread; told() and heard functions are called by
/// the replica's thread at a window's close.
class Joining {
 public:
  enum class State {
    member,     ///< takes part; tells others what they ask for
    listening,  ///< has none of the others' buffers
    adopting,   ///< has their buffers, and takes over the report of the next window that is stepped
  };

  State state() const noexcept { return state_; }
  /// Whether this worker's windows are empty.
  bool watches() const noexcept { return state_ != State::member; }

  /// The job had begun when this worker connected.
  void begin() noexcept { state_ = State::listening; }

  /// Whether somebody watched in the last window, so that this member's next record carries a report.
  bool is_asked() const noexcept { return is_asked_ && !watches(); }
  /// The steps, calls and passes of this window's report.
  void prepare_report(JoinReport report) { report_ = std::move(report); }

  /// At a window's close, before records are exchanged: the encoded report of this worker, which came in `since`, or
  /// empty where it is not asked.
  std::string tell(uint64_t since, double unit, const kernels::LossScaleState& scale);
  /// With the exchanged records: forget what the last window's said, then take one after the other.
  void begin_hearing() noexcept;
  void hear(bool watches, const std::string& report);
  /// The report of the member that came in first; empty where this worker does not listen, or nobody told.
  const JoinReport* heard() const noexcept { return watches() && heard_ ? &*heard_ : nullptr; }

  /// The window's end gave this worker the others' buffers.
  void note_buffers() noexcept { state_ = State::adopting; }

  /// A joining worker, after each window, which was `stepped` or dropped: the state the others reported, once complete;
  /// it then takes part. Empty: keep listening, or nobody is left who knows more, so that it takes part without.
  std::optional<JoinReport> learn(bool stepped);

 private:
  State state_ = State::member;
  State began_as_ = State::member;  // when the last window's records were exchanged
  bool is_asked_ = false;
  bool has_earlier_members_ = true;  // in the last window
  JoinReport report_;
  std::optional<JoinReport> heard_;  // in the last window
};

}  // namespace muster
