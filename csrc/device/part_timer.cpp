#include "device/part_timer.h"

namespace muster {

double PartTimer::seconds() const {
  double seconds = 0;
  for (size_t i = 1; i < points_.size(); i += 2) seconds += points_[i].seconds_since(points_[i - 1]);
  return seconds;
}

}  // namespace muster
