// What a loader needs of the strategy that prepares it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/dealt_pass.h"
#include "data/loader_progress.h"
#include "data/shared_pass.h"
#include "job/topology.h"

namespace muster::detail {

/// Over whom the batches of a loader that is not sharded are divided.
enum class Division : uint8_t {
  all_workers,   ///< for good
  live_workers,  ///< of parameter servers, which step together
  none           ///< servers deal whole batches to workers that step on their own
};

/// Facts that hold for good. A value.
struct LoaderJob {
  Topology topology;
  Division division = Division::all_workers;
  bool joins = false;  ///< this worker came to a job that others had begun
};

/// Owned by the thread that iterates and steps.
class LoaderHost {
 public:
  virtual ~LoaderHost() = default;

  virtual LoaderJob job() const = 0;
  /// The share of a batch that each replica gets, for batches that are asked for next; empty where parts are equal.
  virtual std::vector<double> capacities() const = 0;
  /// Of the order of epochs; a checkpoint that is loaded brings another.
  virtual uint64_t seed() const = 0;
  /// How many the job has made.
  virtual int64_t steps() const noexcept = 0;
  /// Takes a loader up and returns its number, from 0 on. `place` outlives it, and is sent where a checkpoint that was
  /// loaded before had it; null for a loader of Python's. `size`, in words, must be equal on all workers; empty where
  /// each has data of its own. With a size collective over workers until their first step. Throws LayoutMismatch where
  /// it cannot go on there, or another worker has another size.
  virtual int add(const std::shared_ptr<LoaderProgress>& loader, std::shared_ptr<LoaderPlace> place,
                  const std::string& size) = 0;
  /// Collective over the workers that step together: whether any of them has more.
  virtual bool any_has_more(bool has_more) = 0;
  /// Begins a pass of `batches` that servers deal; connects to them, where no step has.
  virtual std::shared_ptr<DealtPass> deal(int loader, int64_t epoch, int64_t batches) = 0;
  /// Begins a pass that live workers divide. Where this worker joined others it connects, where no step has, and goes
  /// on where they are.
  virtual std::shared_ptr<SharedPass> share(int loader, int64_t epoch, SharedPass::NextBatch next_batch) = 0;
  /// Lets other workers, who may wait for it, have what is left of dealt passes that were left early.
  virtual void leave_passes() = 0;
};

}  // namespace muster::detail
