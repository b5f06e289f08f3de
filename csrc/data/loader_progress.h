// What a strategy knows of a prepared loader.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "data/pass.h"
#include "data/shared_pass.h"
#include "muster/loader.h"

namespace muster::detail {

/// How many calls of step a loader's batches go into, in one set of optimizers. Owned by the thread that steps.
class BatchCalls {
 public:
  /// Of a batch that goes into a call.
  struct Noted {
    /// It goes into no further call, if into as many as others: the last batch of a pass as the last one of the pass
    /// before it, in the first pass and elsewhere as the batch before it.
    bool is_through = false;
    /// The last batch of the pass before it was not through: it went into fewer calls than others.
    bool fell_short = false;
  };

  /// `batch`: its number, as LoaderProgress counts; `is_last` of its pass.
  Noted note(int64_t batch, bool is_last);

 private:
  int64_t batch_ = 0;
  int64_t calls_ = 0;  // of that batch
  bool is_last_ = false;
  bool is_through_ = true;
  int64_t usual_ = 1;       // calls of the batch before it
  int64_t usual_last_ = 0;  // calls of the last batch of the pass before; 0: unknown
};

/// Owned by the thread that iterates and steps.
struct LoaderProgress {
  bool at_end = false;               ///< the last batch was yielded and the loader not advanced since
  bool in_step = false;              ///< a batch of it went to a step
  bool in_run = false;               ///< a batch of it went to run
  double usual_rows = 0;             ///< samples of a part of a full batch, on average
  std::shared_ptr<LoaderPass> pass;  ///< the last one, where servers deal its batches or live workers divide them

  int64_t passes = 0;               ///< begun
  int64_t left = 0;                 ///< the last pass whose loop is gone, counted from 1
  int64_t yielded = 0;              ///< batches that loops got, over all passes; the latest one has this number
  int64_t last_batch = 0;           ///< number of the last batch of the pass begun last, once it was yielded; else 0
  int64_t clock = 0;                ///< when the latest batch was yielded, among those of all loaders
  int64_t clock_before = 0;         ///< likewise, the batch before it
  std::map<int, BatchCalls> calls;  ///< by set of optimizers

  /// A pass begins; returns its number.
  int64_t begin_pass() noexcept;
  /// A loop got a batch; `is_last`: of its pass, as far as is known. Returns its number.
  int64_t note_yield(bool is_last) noexcept;
  /// Whether a loop may stand at the last batch of its pass: it is there, and no other loop over one of `loaders` has
  /// got two batches since.
  bool may_stand_at_end(const std::vector<std::weak_ptr<LoaderProgress>>& loaders) const;
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
