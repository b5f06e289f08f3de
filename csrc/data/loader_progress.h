// What a strategy knows of a prepared loader.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "data/pass.h"
#include "data/shared_pass.h"
#include "muster/loader.h"

namespace muster::detail {

/// Owned by the thread that iterates and steps.
struct LoaderProgress {
  bool at_end = false;               ///< the last batch was yielded and the loader not advanced since
  bool in_step = false;              ///< a batch of it went to a step
  bool in_run = false;               ///< a batch of it went to run
  double usual_rows = 0;             ///< samples of a part of a full batch, on average
  int64_t passes = 0;                ///< begun; Python counts none
  std::shared_ptr<LoaderPass> pass;  ///< the last one, where servers deal its batches or live workers divide them
};

/// In what a place within an epoch is counted. Both empty where each worker has data of its own.
struct LoaderExtent {
  std::optional<int64_t> batch_size;  ///< samples
  std::optional<int64_t> size;        ///< samples of the data set; empty for a stream
};

/// How far a C++ loader is; what Python's is in is Python's. Owned by the thread that iterates.
struct LoaderPlace {
  bool is_known = true;                     ///< false where servers deal the batches
  int64_t epoch = 0;                        ///< as Loader::epoch
  bool running = false;                     ///< a pass that counts as an epoch has begun and not ended
  int64_t yielded = 0;                      ///< batches of the pass under way, with those that it passed over
  int64_t to_skip = 0;                      ///< batches that the next pass passes over
  std::shared_ptr<SharedPass> shared = {};  ///< the pass under way, which knows it better: live workers divide it
  LoaderExtent extent = {};
  int64_t num_loads = 0;  ///< of its state

  /// The next pass is of that epoch, and passes over `batches`.
  void go_to(int64_t that_epoch, int64_t batches);
};

/// As Loader::state and load_state.
LoaderState state_of(const LoaderPlace& place);
void take_state(LoaderPlace& place, const LoaderState& state);

}  // namespace muster::detail
