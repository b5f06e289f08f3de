// A timer of a replica's own part of a step.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "device/device.h"

namespace muster {

/// A stopwatch that is started and stopped in turn, any number of times, by the threads that work for the replica, one
/// at a time. On CUDA it measures what the thread's current stream holds between start and stop, and no host waits.
class PartTimer {
 public:
  explicit PartTimer(c10::Device device) : device_(device) {}

  void start() { points_.emplace_back(device_); }
  void stop() { points_.emplace_back(device_); }

  /// After a stop (or before the first start): whether the device has got there.
  bool is_known() const { return points_.empty() || points_.back().has_passed(); }
  /// Between starts and stops, added up. Call it when it is known.
  double seconds() const;

 private:
  c10::Device device_;
  std::vector<TimedPoint> points_;
};

}  // namespace muster
