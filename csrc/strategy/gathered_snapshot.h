// A checkpoint of a job whose workers may be on hosts that have each a part of it.
//
// Which one is the newest: folders that no job has written to together may have the same numbers. Those of one lineage,
// that is of a job and of all that went on from what it saved ("muster.lineage" in their metadata), are ordered by
// their numbers. Those of the lineage of the chief's newest come first, of which its host may have a part alone, then
// what else its host has; those of other lineages on other hosts, the one first of which any has made the most steps,
// are taken only where the chief's host has none. Of a snapshot that is newer by its number, or its steps, and is not
// taken since it is of another lineage, or all of it is nowhere, the chief's log names the folder and the host.
#pragma once

#include <filesystem>
#include <optional>

#include "checkpoint/snapshot.h"
#include "comm/communicator.h"
#include "strategy/kept_metric.h"

namespace muster {

/// The snapshot that `path` asks for (checkpoint::asked_snapshot), the newest of which every file is good on some
/// worker or the one with its number, where each worker looks into the folder as it sees it: the chief's own files
/// first. On the chief; others get nothing, and give it what it has not. A snapshot that is damaged, or lacks a file,
/// is named in the chief's log, with the file and the host that wrote it, and passed over for the next; before all of
/// one is known to be good, nothing of it is sent. None where the newest is asked for and nobody has any. Throws
/// CheckpointError on all where no snapshot that was asked for is good, or the chief cannot use the folder,
/// InvalidArgument for one under another name. What the program keeps is copied (checkpoint::copy_what_is_kept).
/// Collective.
std::optional<checkpoint::StoredSnapshot> read_asked_snapshot(comm::Communicator& workers,
                                                              const std::filesystem::path& path);

/// What Checkpoints::best wrote to the first snapshot in that order that has it and of which every file is good on some
/// worker; those that the chief has written, or read before, are not read again. None where there is no such, and then
/// the chief's log names those that are damaged. Equal on all workers. Throws CheckpointError on all where the chief
/// cannot use the folder. Collective.
std::optional<KeptMetric> kept_metric(comm::Communicator& workers, const std::filesystem::path& folder);

}  // namespace muster
