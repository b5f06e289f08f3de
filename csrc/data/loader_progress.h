// What a strategy knows of a prepared loader.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "data/pass.h"
#include "data/shared_pass.h"
#include "muster/loader.h"

namespace muster::detail {

/// How many calls of step a loader's batches go into, in one set of optimizers. The last batch of a pass is expected to
/// go into as many as the last one of the pass before; where there was none, and of other batches, as the latest batch
/// that was not a pass's last. Batches have the numbers that LoaderProgress counts. Owned by the thread that steps.
class BatchCalls {
 public:
  /// Whether a call that the batch goes into now is the last one expected of it; `is_last`: it is its pass's.
  bool ends(int64_t batch, bool is_last) const;
  /// Whether the batch is another one than in the call before, which was the last of its pass and went into fewer calls
  /// than expected.
  bool fell_short(int64_t batch) const;
  /// Counts a call that the batch went into.
  void note(int64_t batch, bool is_last);

 private:
  struct Usual {
    int64_t calls = 1;          // of the latest batch that was not a pass's last
    int64_t calls_of_last = 0;  // of the latest one that was; 0: unknown

    int64_t expected(bool of_last) const { return of_last && calls_of_last > 0 ? calls_of_last : calls; }
  };
  Usual usual_for(int64_t batch) const;

  int64_t batch_ = 0;  // of the latest call
  int64_t calls_ = 0;  // that it went into
  bool is_last_ = false;
  Usual usual_;  // before that batch
};

/// Owned by the thread that iterates and steps.
struct LoaderProgress {
  bool at_end = false;  ///< the last batch was yielded, as far as is known, and the loader not advanced since
  /// Finds out whether that is so, where it takes reading; empty where it is known, or the loader is gone.
  std::function<void()> find_end;
  bool in_step = false;              ///< a batch of it went to a step
  bool in_run = false;               ///< a batch of it went to run
  double usual_rows = 0;             ///< samples of a part of a full batch, on average
  std::shared_ptr<LoaderPass> pass;  ///< the last one, where servers deal its batches or live workers divide them

  int64_t passes = 0;   ///< begun
  int64_t left = 0;     ///< the last pass whose loop is gone, counted from 1
  int64_t yielded = 0;  ///< batches that loops got, over all passes; the latest one has this number
  int64_t before = 0;   ///< those of passes before the one that was begun last
  /// Number of the last batch of the pass begun last, once it was yielded; else 0. Loops that fetch ahead step it after
  /// at_end has turned false.
  int64_t last_batch = 0;
  int64_t clock = 0;                ///< when the latest batch was yielded, among those of all loaders
  int64_t clock_before = 0;         ///< likewise, the batch before it
  std::map<int, BatchCalls> calls;  ///< by set of optimizers

  /// A pass begins; returns its number.
  int64_t begin_pass() noexcept;
  /// A loop got a batch; `is_last`: of its pass, as far as is known. Returns its number.
  int64_t note_yield(bool is_last) noexcept;
  /// No batch follows the one that was yielded last.
  void note_end() noexcept;
  /// Likewise, now that a loop has asked for another one: loops that fetch ahead step the last one later.
  void note_passed_end() noexcept;
  /// The loop over that pass is gone.
  void leave(int64_t number) noexcept { left = std::max(left, number); }
  /// Whether a loop may stand at the last batch of its pass: it is there, and no other loop over one of `loaders` has
  /// got two batches since, but for loops of run() alone.
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
  std::optional<int64_t> left_at = {};      ///< the job's steps when the loop over that pass was gone
  int64_t yielded = 0;                      ///< batches of the pass under way, with those that it passed over
  int64_t to_skip = 0;                      ///< batches that the next pass passes over
  std::shared_ptr<SharedPass> shared = {};  ///< the pass under way, which knows it better: live workers divide it
  LoaderExtent extent = {};
  int64_t num_loads = 0;  ///< of its state
  /// The loader is gone, and no batch of it went to a step: nobody goes on with it.
  bool is_over = false;

  /// The next pass is of that epoch, and passes over `batches`.
  void go_to(int64_t that_epoch, int64_t batches);
};

/// As Loader::state and load_state. `steps`: how many the job has made.
LoaderState state_of(const LoaderPlace& place, int64_t steps);
void take_state(LoaderPlace& place, const LoaderState& state);

}  // namespace muster::detail
