// How long a worker waits for a server that does not answer.
#pragma once

#include <algorithm>
#include <chrono>
#include <utility>

#include "server/worker/client_config.h"

namespace muster::server {

/// How long a server is waited for, by what each try to reach it has found: as long as the patience where it is away,
/// kStandstillPatience at least where its process listens and says nothing, and on and on while it is busy. A value.
class Absence {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  Absence(TimePoint begin, std::chrono::milliseconds patience)
      : patience_(patience), begin_(begin), deadline_(begin + patience) {}

  /// Nobody listens at its address, or the connection ended.
  void note_gone(TimePoint now) {
    if (std::exchange(was_silent_, false)) deadline_ = std::min(deadline_, now + patience_);
  }
  /// Its process listens there, and gave no answer in time: it may stand still.
  void note_silent() {
    was_silent_ = true;
    deadline_ = std::max(deadline_, begin_ + std::max(patience_, kStandstillPatience));
  }
  /// It has something else to do until `until`, and answers then.
  void note_busy(TimePoint until) {
    was_silent_ = false;
    begin_ = until;
    deadline_ = until + patience_;
  }
  bool is_over(TimePoint now) const { return now > deadline_; }

 private:
  std::chrono::milliseconds patience_;
  TimePoint begin_;  // of the absence
  TimePoint deadline_;
  bool was_silent_ = false;  // at the last try
};

}  // namespace muster::server
