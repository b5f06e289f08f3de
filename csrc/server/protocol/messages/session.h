// How a worker and a server meet, and part.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "server/protocol/messages/batches.h"
#include "server/protocol/messages/bounds.h"
#include "server/protocol/messages/plan_fields.h"
#include "server/protocol/wire.h"

namespace muster::server {

/// A worker introduces a connection, its first message. `incarnation` 0 asks server 0 for one.
struct Hello {
  static constexpr uint16_t kType = 1;
  uint32_t rank = 0;
  uint32_t lane = 0;
  uint64_t incarnation = 0;

  static constexpr auto kFields = fields(&Hello::rank, &Hello::lane, &Hello::incarnation);
};

/// `life` differs each time that a server starts.
struct Welcome {
  static constexpr uint16_t kType = 2;
  uint64_t life = 0;
  uint64_t incarnation = 0;

  static constexpr auto kFields = fields(&Welcome::life, &Welcome::incarnation);
};

/// The request could not be served; the connection goes on.
struct Refusal {
  static constexpr uint16_t kType = 3;
  enum class Kind : uint8_t { other, invalid_argument, layout_mismatch, timeout, fenced, checkpoint, chief_lost };
  Kind kind = Kind::other;
  std::string text;

  static constexpr auto kFields = fields(&Refusal::kind, bounded(&Refusal::text, kMaxText));
};
template <>
struct LastOf<Refusal::Kind> {
  static constexpr auto kValue = Refusal::Kind::chief_lost;
};

struct Done {
  static constexpr uint16_t kType = 4;
  static constexpr auto kFields = fields();
};

/// The first one counts; later ones must not differ from it. A greater `job` ends the one before, whose workers are
/// fenced; `facts` are those of the job's first worker.
struct Configure {
  static constexpr uint16_t kType = 5;
  uint32_t server = 0;  ///< which one this is
  Plan plan;
  uint64_t job = 0;
  std::string facts = {};  ///< what a worker that joins later has to know; servers do not read it

  static constexpr auto kFields =
      fields(&Configure::server, &Configure::plan, &Configure::job, bounded(&Configure::facts, kMaxRecord));
};

/// `started`: the server has its values already.
struct Configured {
  static constexpr uint16_t kType = 25;
  bool started = false;

  static constexpr auto kFields = fields(&Configured::started);
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
  std::vector<uint32_t> present;  ///< its members that are connected, ascending
  std::string facts;              ///< of the job

  static constexpr auto kFields = fields(&Standing::started, &Standing::job, bounded(&Standing::present, kMaxWorkers),
                                         bounded(&Standing::facts, kMaxRecord));
};

/// All initial values are written.
struct Start {
  static constexpr uint16_t kType = 9;
  static constexpr auto kFields = fields();
};

/// Waits for Start, and makes the worker a member. `step`: what server 0 answered; to server 0 itself, 0.
struct Join {
  static constexpr uint16_t kType = 10;
  uint64_t step = 0;
  bool returns = false;  ///< after a lost connection: what it pushed it will push again

  static constexpr auto kFields = fields(&Join::step, &Join::returns);
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
  uint64_t durable = 0;

  static constexpr auto kFields = fields(&Beaten::durable);
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

/// The worker ends in good order.
struct Leave {
  static constexpr uint16_t kType = 24;
  static constexpr auto kFields = fields();
};

}  // namespace muster::server
