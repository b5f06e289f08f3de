// A step: pushes, commits, sums, and the command that applies it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/norm_sum.h"
#include "muster/error.h"
#include "server/protocol/messages/batches.h"
#include "server/protocol/messages/bounds.h"
#include "server/protocol/messages/plan_fields.h"
#include "server/protocol/wire.h"

namespace muster::server {

/// One worker's sums of a chunk in a step: the payload, of the chunk's gradient bytes.
struct Push {
  static constexpr uint16_t kType = 12;
  uint64_t step = 0;
  uint32_t chunk = 0;

  static constexpr auto kFields = fields(&Push::step, &Push::chunk);
};

/// The push is held. Not `fresh`: it was held, or applied, before.
struct Pushed {
  static constexpr uint16_t kType = 13;
  uint64_t step = 0;
  uint32_t chunk = 0;  ///< or table
  bool fresh = false;

  static constexpr auto kFields = fields(&Pushed::step, &Pushed::chunk, &Pushed::fresh);
};

/// To server 0: everything that this worker pushes in `step` is held by all servers (synchronous), or applied.
struct Commit {
  static constexpr uint16_t kType = 14;
  uint64_t step = 0;
  std::vector<double> numbers;  ///< synchronous: added over members
  std::string record = {};      ///< synchronous: shown to all members
  uint64_t cut = 0;          ///< synchronous: the last step of which all servers, as the worker knows, have a snapshot
  bool log_is_full = false;  ///< synchronous: the worker cannot push another step before one of these is durable

  static constexpr auto kFields = fields(&Commit::step, bounded(&Commit::numbers, kMaxNumbers),
                                         bounded(&Commit::record, kMaxRecord), &Commit::cut, &Commit::log_is_full);
};

/// What servers keep of a synchronous step in snapshots.
struct Cut {
  bool is_due = false;  ///< all servers keep a snapshot of what they hold after this step
  uint64_t keep = 0;    ///< snapshots from this step on may be needed; older ones may go

  static constexpr auto kFields = fields(&Cut::is_due, &Cut::keep);

  bool operator==(const Cut&) const = default;
};

/// Who takes part in a step, and what comes of their commits. The answer to Commit; also sent by a worker to a server 0
/// that started again and may not know it.
struct Decision {
  static constexpr uint16_t kType = 15;
  uint64_t step = 0;
  std::vector<uint32_t> members = {};       ///< ranks whose commits count, ascending
  std::vector<uint32_t> next_members = {};  ///< ranks that are expected in the next step, ascending
  std::vector<double> numbers = {};         ///< sums along the tree over ranks
  std::vector<std::string> records = {};    ///< of members, each text once; none where steps are not decided together
  std::vector<uint32_t> record_of = {};     ///< by member: which of `records`
  Cut cut = {};

  bool operator==(const Decision&) const = default;

  static constexpr auto kFields =
      fields(&Decision::step, bounded(&Decision::members, kMaxWorkers), bounded(&Decision::next_members, kMaxWorkers),
             bounded(&Decision::numbers, kMaxNumbers), bounded(&Decision::records, kMaxWorkers, kMaxRecord),
             bounded(&Decision::record_of, kMaxWorkers), &Decision::cut);

  /// That of the i-th member. Throws CommError where there is none.
  const std::string& record(size_t i) const {
    if (i < record_of.size() && record_of[i] < records.size()) return records[record_of[i]];
    throw CommError("a decision lacks what a worker showed; run one version of Muster on all workers and servers");
  }
};

/// Asks for the norm of the sums of a step over `members`, once the server holds them all.
struct Sum {
  static constexpr uint16_t kType = 16;
  uint64_t step = 0;
  std::vector<uint32_t> members;

  static constexpr auto kFields = fields(&Sum::step, bounded(&Sum::members, kMaxWorkers));
};

/// The partials of all that the server has of the sums, chunks and tables, as one.
struct Partials {
  static constexpr uint16_t kType = 17;
  kernels::NormSum sum = {};

  static constexpr auto kFields = fields(&Partials::sum);
};

/// Makes step `step` of every chunk and table from the pushes of `members`. The same from every member of a synchronous
/// step; else `members` is the sender alone.
struct Apply {
  static constexpr uint16_t kType = 18;
  uint64_t step = 0;
  std::vector<uint32_t> members;
  kernels::StepScalars scalars{.divisor = 1, .clip = 1, .norm = 0, .unit = 1, .finite = 1, .dropped = 0};
  FlatGroups groups;
  std::vector<uint32_t> unused;              ///< parameters that stay as they are, ascending
  std::vector<BatchId> batches = {};         ///< dealt ones that the step is made of
  std::vector<uint32_t> unused_tables = {};  ///< that nobody's rows were used of, ascending: they count no step
  Cut cut = {};                              ///< of the step's Decision

  static constexpr auto kFields =
      fields(&Apply::step, bounded(&Apply::members, kMaxWorkers), &Apply::scalars, field(&Apply::groups, GroupsField()),
             bounded(&Apply::unused, kMaxParameters), bounded(&Apply::batches, kMaxBatches),
             bounded(&Apply::unused_tables, kMaxTables), &Apply::cut);
};

/// Up to which step of a worker a server holds everything in snapshots.
struct Durable {
  uint64_t all = 0;     ///< in each of those that it could go on from: the worker need not push these steps again
  uint64_t newest = 0;  ///< in the newest one

  static constexpr auto kFields = fields(&Durable::all, &Durable::newest);
};

/// The first acknowledgement, `step`, and the second one.
struct Applied {
  static constexpr uint16_t kType = 19;
  uint64_t step = 0;
  Durable durable;

  static constexpr auto kFields = fields(&Applied::step, &Applied::durable);
};

}  // namespace muster::server
