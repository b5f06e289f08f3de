// Loaders in a checkpoint.
#pragma once

#include <string>
#include <vector>

#include "data/loader_progress.h"
#include "muster/loader.h"
#include "muster/saved_value.h"
#include "server/protocol/messages/batches.h"

namespace muster::detail {

/// What a checkpoint has of a loader whose batches servers deal: that it is in `epoch`, and how far its passes are.
SavedValue::Dict saved_loader(int64_t epoch, const std::vector<server::PassProgress>& passes);

/// How far the passes are of the job's `loader`-th loader, for servers that deal on. Throws as integer().
std::vector<server::PassProgress> passes_in(const SavedValue::Dict& saved, uint32_t loader);

/// Where this worker goes on in a loader whose batches it has for itself. Batches that servers had dealt out of order
/// come once more, as a warning says. Throws as integer().
LoaderState place_in(const SavedValue::Dict& saved);

/// Adds to what a checkpoint has of a loader in what its place is counted.
void add_extent(SavedValue::Dict& saved, const LoaderExtent& extent);

/// Throws LayoutMismatch naming the `loader` where the checkpoint is of the middle of an epoch of other batches or
/// data.
void check_extent(const SavedValue::Dict& saved, const LoaderExtent& extent, const std::string& loader);

}  // namespace muster::detail
