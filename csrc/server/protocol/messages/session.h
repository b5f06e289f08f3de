// How a worker and a server meet, and part.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "server/protocol/messages/batches.h"
#include "server/protocol/messages/bounds.h"
#include "server/protocol/messages/plan_fields.h"
#include "server/protocol/messages/steps.h"
#include "server/protocol/wire.h"

namespace muster::server {

/// A worker introduces a connection, its first message. `incarnation` 0 asks server 0 for one. While members of a job
/// with another `token` give signs of life, the worker is refused as `occupied`, unless its job `takes_over`.
struct Hello {
  static constexpr uint16_t kType = 1;
  uint32_t rank = 0;
  uint32_t lane = 0;
  uint64_t incarnation = 0;
  std::string token = {};  ///< who started the job: the same where a launcher starts its workers again
  bool takes_over = false;

  static constexpr auto kFields =
      fields(&Hello::rank, &Hello::lane, &Hello::incarnation, bounded(&Hello::token, kMaxToken), &Hello::takes_over);
};

/// `life` differs each time that a server starts.
struct Welcome {
  static constexpr uint16_t kType = 2;
  uint64_t life = 0;
  uint64_t incarnation = 0;

  static constexpr auto kFields = fields(&Welcome::life, &Welcome::incarnation);
};

/// The request could not be served; the connection goes on. `occupied`: another job trains on the server.
struct Refusal {
  static constexpr uint16_t kType = 3;
  enum class Kind : uint8_t {
    other,
    invalid_argument,
    layout_mismatch,
    timeout,
    fenced,
    checkpoint,
    chief_lost,
    occupied
  };
  Kind kind = Kind::other;
  std::string text;

  static constexpr auto kFields = fields(&Refusal::kind, bounded(&Refusal::text, kMaxText));
};
template <>
struct LastOf<Refusal::Kind> {
  static constexpr auto kValue = Refusal::Kind::occupied;
};

/// The answer to anything while the server reads its snapshot; ask again.
struct Busy {
  static constexpr uint16_t kType = 38;
  uint64_t done = 0;  ///< bytes that are read
  uint64_t total = 0;

  static constexpr auto kFields = fields(&Busy::done, &Busy::total);
};

struct Done {
  static constexpr uint16_t kType = 4;
  static constexpr auto kFields = fields();
};

/// The first one counts; later ones must not differ from it. A greater `job` ends the one before, whose workers are
/// fenced; `facts` are those of the job's first worker. From a worker that returns the greater one is no new one: the
/// server forgot that it began. One that joins waits until the server knows of the job, and where it goes on.
struct Configure {
  static constexpr uint16_t kType = 5;
  enum class Coming : uint8_t {
    begins,      ///< a job, which goes on from what the servers hold
    joins,       ///< a job that runs
    returns,     ///< to the job in which it takes part
    begins_anew  ///< a job, with values of its own: what an earlier one left is given up
  };
  uint32_t server = 0;  ///< which one this is
  Plan plan;
  uint64_t job = 0;
  std::string facts = {};  ///< what a worker that joins later has to know; servers do not read it
  Coming coming = Coming::begins;

  static constexpr auto kFields = fields(&Configure::server, &Configure::plan, &Configure::job,
                                         bounded(&Configure::facts, kMaxRecord), &Configure::coming);
};
template <>
struct LastOf<Configure::Coming> {
  static constexpr auto kValue = Configure::Coming::begins_anew;
};

/// What the server holds.
struct Configured {
  static constexpr uint16_t kType = 25;
  bool started = false;        ///< it has its values
  bool is_untouched = false;   ///< nobody has stepped what it has: the chief may write over it
  bool owns = false;           ///< chunks or tables
  bool is_settled = true;      ///< false: the job began after another one, and waits for Resume
  uint64_t made = 0;           ///< the last step that all its chunks and tables have made
  uint64_t begun = 0;          ///< the last one that any of them has made
  uint64_t origin = 0;         ///< the job whose chief wrote the values that these came from; 0: none did
  std::vector<uint64_t> cuts;  ///< steps whose snapshots it can go back to, ascending; of a synchronous job
  /// Of a synchronous job: the command of the newest step that was begun, or none.
  std::vector<Apply> command = {};

  static constexpr auto kFields =
      fields(&Configured::started, &Configured::is_untouched, &Configured::owns, &Configured::is_settled,
             &Configured::made, &Configured::begun, &Configured::origin, bounded(&Configured::cuts, kMaxCuts),
             bounded(&Configured::command, size_t{1}));
};

/// The chief's, to all servers of a job that began after another one: it goes on after `step`. With the step's
/// `command` a server makes that step, where it is the next one and all its parts are there, or refuses; nothing is
/// said yet. Without one a server that is elsewhere goes back to its snapshot of the step, and Join waits no longer.
/// Where steps are not made together, `step` is 0 and nothing changes.
struct Resume {
  static constexpr uint16_t kType = 39;
  uint64_t step = 0;
  std::vector<Apply> command = {};  ///< of that step, or none

  static constexpr auto kFields = fields(&Resume::step, bounded(&Resume::command, size_t{1}));
};

/// Asks server 0 how its job stands. Needs no Hello, and makes nobody a worker.
struct Inquire {
  static constexpr uint16_t kType = 36;
  static constexpr auto kFields = fields();
};

struct Standing {
  static constexpr uint16_t kType = 37;
  bool started = false;           ///< the server has its values
  uint64_t job = 0;               ///< the last one; 0 before the first
  std::vector<uint32_t> present;  ///< its members that gave a sign of life within the last second, ascending
  std::string facts;              ///< of the job
  std::string token;              ///< likewise

  static constexpr auto kFields = fields(&Standing::started, &Standing::job, bounded(&Standing::present, kMaxWorkers),
                                         bounded(&Standing::facts, kMaxRecord), bounded(&Standing::token, kMaxToken));
};

/// All initial values are written, and server 0 deals on in `passes`.
struct Start {
  static constexpr uint16_t kType = 9;
  std::vector<PassProgress> passes = {};

  static constexpr auto kFields = fields(bounded(&Start::passes, kMaxPasses));
};

/// Waits for Start, and makes the worker a member. `step`: what server 0 answered; to server 0 itself, 0.
struct Join {
  static constexpr uint16_t kType = 10;
  uint64_t step = 0;
  bool returns = false;                ///< after a lost connection: what it pushed it will push again
  uint64_t first = 0;                  ///< of one that returns: the first step that it can push
  std::vector<BatchId> held = {};      ///< likewise, to server 0: batches that it was dealt and has not finished
  std::vector<BatchId> finished = {};  ///< likewise: those that it finished and that may not be durable

  static constexpr auto kFields = fields(&Join::step, &Join::returns, &Join::first, bounded(&Join::held, kMaxBatches),
                                         bounded(&Join::finished, kMaxBatches));
};

/// Step `step` + 1 is the worker's first.
struct Joined {
  static constexpr uint16_t kType = 11;
  uint64_t step = 0;
  std::vector<PassId> passes = {};  ///< from server 0: see Dealer::newest

  static constexpr auto kFields = fields(&Joined::step, bounded(&Joined::passes, kMaxLoaders));
};

/// A sign of life.
struct Beat {
  static constexpr uint16_t kType = 20;
  bool wants_snapshot = false;

  static constexpr auto kFields = fields(&Beat::wants_snapshot);
};

struct Beaten {
  static constexpr uint16_t kType = 21;
  Durable durable;
  std::string trouble;    ///< why the last snapshot failed, and those before it since one was written; else empty
  uint32_t failures = 0;  ///< how many those are
  /// As many are an error for who waits for a snapshot.
  static constexpr uint32_t kTooMany = 2;

  static constexpr auto kFields = fields(&Beaten::durable, bounded(&Beaten::trouble, kMaxText), &Beaten::failures);
};

/// Asks how far each chunk is, after a connection was lost.
struct Recall {
  static constexpr uint16_t kType = 22;
  static constexpr auto kFields = fields();
};

/// By chunk of the server, then by table, in order: the last step that is applied (of this worker, unless synchronous).
struct Recalled {
  static constexpr uint16_t kType = 23;
  std::vector<uint64_t> steps;

  static constexpr auto kFields = fields(bounded(&Recalled::steps, kMaxNumbers));
};

/// The worker ends in good order. Answered once its steps are in a snapshot, or a minute later.
struct Leave {
  static constexpr uint16_t kType = 24;
  static constexpr auto kFields = fields();
};

}  // namespace muster::server
