// From the times that replicas take for their parts to the share of a batch that each of them gets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/part_timer.h"

namespace muster {

/// The capacities of replicas: their speeds (rows per second, medians over a window of steps), as fractions of the sum.
/// Speeds are those at the sizes of the window, so where a part also costs time that does not depend on its rows, some
/// rounds lead to sizes at which replicas finish together.
///
/// Owned by the thread that steps, but for capacities().
class Balancer {
 public:
  /// Steps of the first window; each is followed by one of twice its length, up to kLongestWindow, so that noise
  /// changes less and less. The first step, and the first after a change, warms up and does not count.
  static constexpr size_t kFirstWindow = 5;
  static constexpr size_t kLongestWindow = 80;
  /// Capacities change where a window's median step would have taken less than this of its time.
  static constexpr double kWorthwhile = 0.95;
  /// A replica that is so slow that it gets no rows is tried again after this many steps, and twice as many each time
  /// that it is still too slow.
  static constexpr size_t kFirstPatience = 200;

  /// Equal capacities.
  explicit Balancer(int replicas);

  /// By replica; they sum to 1. Thread-safe.
  std::vector<double> capacities() const;

  /// One step, by replica: the rows of its part (negative: unknown) and the seconds it took. Returns whether capacities
  /// changed, which is logged. Steps that were not divided by these capacities do not count, nor does one of less than
  /// half of the rows of the step before (an epoch's last batch).
  bool note(const std::vector<int64_t>& rows, const std::vector<double>& seconds);

  /// The same for a step whose times may not be known yet: they are noted, in order, by the first call that finds them.
  void note_when_known(std::vector<int64_t> rows, std::vector<std::shared_ptr<const PartTimer>> timers);

 private:
  struct Step {
    std::vector<int64_t> rows;
    std::vector<double> seconds;
  };
  struct TimedStep {
    std::vector<int64_t> rows;
    std::vector<std::shared_ptr<const PartTimer>> timers;
  };
  struct Replica {
    double speed = 0;  // 0: never measured
    bool is_idle = false;
    size_t idle_steps = 0;
    size_t patience = kFirstPatience;
  };

  bool look();
  void measure();
  bool try_idle_replicas(double step_seconds);
  double slowest_part(const Step& step) const;
  double slowest_part_with(const std::vector<double>& capacities, const Step& step) const;
  void set_capacities(std::vector<double> capacities);

  mutable std::mutex mutex_;
  std::vector<double> capacities_;  // guarded by mutex_, written by the thread that steps
  std::vector<Replica> replicas_;
  std::vector<Step> window_;
  size_t window_length_ = kFirstWindow;
  bool is_warm_ = false;
  int64_t last_rows_ = 0;
  std::deque<TimedStep> pending_;
};

/// "0.75, 0.25".
std::string in_words(const std::vector<double>& capacities);

}  // namespace muster
