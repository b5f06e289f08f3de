// The newest checkpoint of a job whose workers may be on hosts that have each a part of it.
#pragma once

#include <filesystem>
#include <optional>

#include "checkpoint/snapshot.h"
#include "comm/communicator.h"

namespace muster {

/// The newest snapshot of which every file is good on some worker, each of which looks into `folder` as it sees it:
/// the chief's own files first. On the chief; others get nothing, and give it what it has not. A snapshot that is
/// damaged, or lacks a file, is named in the chief's log, with the file and the host that wrote it, and passed over for
/// the one before; before all of one is known to be good, nothing of it is sent. None where nobody has any. Throws
/// CheckpointError on all where no snapshot is good, or the chief cannot use the folder. Collective.
std::optional<checkpoint::StoredSnapshot> read_newest_snapshot(comm::Communicator& workers,
                                                               const std::filesystem::path& folder);

}  // namespace muster
