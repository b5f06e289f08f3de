// What a window amounted to, and how replicas failed in it.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "muster/step.h"
#include "window/device_numbers.h"

namespace muster {

/// How a replica's step failed, in words that travel to other ranks; empty `type` means it did not.
struct Failure {
  enum class Kind {
    own,        ///< raised here
    remote,     ///< the consequence of another replica's failure
    transport,  ///< communication broke: nothing can be agreed any more
  };
  std::string type;
  std::string text;
  Kind kind = Kind::own;
  explicit operator bool() const noexcept { return !type.empty(); }
};

/// A closed window's numbers, equal on all ranks; or those of this worker's share of an open one. Where replicas work
/// on streams, the numbers are those of `on_device`; a window that is not dropped here may be there, and `finite` is
/// true unless the host had to look.
struct WindowSums {
  /// The tensors of the step's result, on replica 0's device; empty where the numbers below count.
  std::optional<StepResult> on_device;
  /// With `on_device`, of a closed window.
  DeviceReport report;
  double weight = 0;
  double loss = 0;       ///< mean, or sum for Reduction::sum
  double grad_norm = 0;  ///< before clipping; NaN or inf when not finite
  bool stop_requested = false;
  bool dropped = false;  ///< weight 0: nothing changes
  bool finite = true;
  std::map<std::string, double> metrics;  ///< means over the losses that brought them
  /// Who failed: worker rank, replica, type and text; empty when nobody did.
  struct Failed {
    int rank;
    int replica;
    Failure failure;
  };
  std::vector<Failed> failures;
  /// With locate_non_finite: "parameter 'x' of replica 2", or empty.
  std::string non_finite_at;

  /// Whether the window goes no further than its tail: it was dropped, or a replica failed.
  bool ends_unchanged() const noexcept { return dropped || !failures.empty(); }
};

}  // namespace muster
