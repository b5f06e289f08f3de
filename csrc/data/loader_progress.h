// What a strategy knows of a prepared loader.
#pragma once

#include <memory>

#include "data/pass.h"

namespace muster::detail {

/// Owned by the thread that iterates and steps.
struct LoaderProgress {
  bool at_end = false;               ///< the last batch was yielded and the loader not advanced since
  bool in_step = false;              ///< a batch of it went to a step
  bool in_run = false;               ///< a batch of it went to run
  double usual_rows = 0;             ///< samples of a part of a full batch, on average
  std::shared_ptr<LoaderPass> pass;  ///< the last one, where servers deal its batches or live workers divide them
};

}  // namespace muster::detail
