// The messages between workers and parameter servers; docs/parameter_server_protocol.md says who sends what when, and
// gives the bytes. One struct a message; a list's bound is checked before it is read.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "net/channel.h"
#include "server/protocol/plan.h"
#include "server/protocol/wire.h"

namespace muster::server {

using net::Bytes;
using net::Deadline;

inline constexpr size_t kMaxNumbers = size_t{1} << 22;
inline constexpr size_t kMaxText = size_t{64} << 10;
inline constexpr size_t kMaxBatches = size_t{1} << 16;
inline constexpr size_t kMaxRecord = size_t{1} << 20;
inline constexpr size_t kMaxLoaders = 4096;

/// A worker introduces a connection, its first message. `incarnation` 0 asks server 0 for one.
struct Hello {
  static constexpr uint16_t kType = 1;
  uint32_t rank = 0;
  uint32_t lane = 0;
  uint64_t incarnation = 0;

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.rank);
    w.number(m.lane);
    w.number(m.incarnation);
  }
};

/// `life` differs each time that a server starts.
struct Welcome {
  static constexpr uint16_t kType = 2;
  uint64_t life = 0;
  uint64_t incarnation = 0;

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.life);
    w.number(m.incarnation);
  }
};

/// The request could not be served; the connection goes on.
struct Failure {
  static constexpr uint16_t kType = 3;
  enum class Kind : uint8_t { other, invalid_argument, layout_mismatch, timeout, fenced, checkpoint, chief_lost };
  Kind kind = Kind::other;
  std::string text;

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.kind);
    w.text(m.text, kMaxText);
  }
};

struct Done {
  static constexpr uint16_t kType = 4;
  template <class M, class W>
  static void visit(M&, W&) {}
};

/// The first one counts; later ones must not differ from it. A greater `job` ends the one before, whose workers are
/// fenced; `facts` are those of the job's first worker.
struct Configure {
  static constexpr uint16_t kType = 5;
  uint32_t server = 0;  ///< which one this is
  Plan plan;
  uint64_t job = 0;
  std::string facts = {};  ///< what a worker that joins later has to know; servers do not read it

  template <class M, class W>
  static void visit(M& m, W& w);
};

/// `started`: the server has its values already.
struct Configured {
  static constexpr uint16_t kType = 25;
  bool started = false;

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.started);
  }
};

/// Asks server 0 how its job stands. Needs no Hello, and makes nobody a worker.
struct Inquire {
  static constexpr uint16_t kType = 36;
  template <class M, class W>
  static void visit(M&, W&) {}
};

struct Standing {
  static constexpr uint16_t kType = 37;
  bool started = false;           ///< the server has its values
  uint64_t job = 0;               ///< the last one; 0 before the first
  std::vector<uint32_t> present;  ///< its members that are connected, ascending
  std::string facts;              ///< of the job

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.started);
    w.number(m.job);
    w.numbers(m.present, kMaxWorkers);
    w.text(m.facts, kMaxRecord);
  }
};

/// What a chunk has besides its parameters.
enum class Part : uint8_t { parameter, state0, state1, state2, master, steps };

/// The chief's initial values; the payload is the part of the whole chunk. Part::steps: an fp32 count a piece.
struct Write {
  static constexpr uint16_t kType = 6;
  uint32_t chunk = 0;
  Part part = Part::parameter;

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.chunk);
    w.number(m.part);
  }
};

/// Asks for a part, once the chunk has made `at_least` steps. With `shares` it is written to `place` of the memory that
/// the worker shares.
struct Read {
  static constexpr uint16_t kType = 7;
  uint32_t chunk = 0;
  Part part = Part::parameter;
  uint64_t at_least = 0;
  bool shares = false;
  uint64_t place = 0;

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.chunk);
    w.number(m.part);
    w.number(m.at_least);
    w.number(m.shares);
    w.number(m.place);
  }
};

/// The payload is the part; it is empty where the chunk has no such state. To PullRows: values in the order of the
/// rows.
struct Values {
  static constexpr uint16_t kType = 8;
  uint32_t chunk = 0;  ///< or table
  uint64_t steps = 0;  ///< that it had made

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.chunk);
    w.number(m.steps);
  }
};

/// All initial values are written.
struct Start {
  static constexpr uint16_t kType = 9;
  template <class M, class W>
  static void visit(M&, W&) {}
};

/// Waits for Start, and makes the worker a member. `step`: what server 0 answered; to server 0 itself, 0.
struct Join {
  static constexpr uint16_t kType = 10;
  uint64_t step = 0;
  bool returns = false;  ///< after a lost connection: what it pushed it will push again

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.step);
    w.number(m.returns);
  }
};

/// A pass over the job's `loader`-th prepared loader.
struct PassId {
  uint32_t loader = 0;
  uint64_t epoch = 0;

  bool operator==(const PassId&) const = default;
};

template <class M, class W>
void visit_passes(M& passes, W& w) {
  w.list(passes, kMaxLoaders, [](W& wire, auto& pass) {
    wire.number(pass.loader);
    wire.number(pass.epoch);
  });
}

/// Step `step` + 1 is the worker's first.
struct Joined {
  static constexpr uint16_t kType = 11;
  uint64_t step = 0;
  std::vector<PassId> passes = {};  ///< from server 0: see Dealer::newest

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.step);
    visit_passes(m.passes, w);
  }
};

/// One worker's sums of a chunk in a step: the payload, of the chunk's gradient bytes.
struct Push {
  static constexpr uint16_t kType = 12;
  uint64_t step = 0;
  uint32_t chunk = 0;

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.step);
    w.number(m.chunk);
  }
};

/// The push is held. Not `fresh`: it was held, or applied, before.
struct Pushed {
  static constexpr uint16_t kType = 13;
  uint64_t step = 0;
  uint32_t chunk = 0;  ///< or table
  bool fresh = false;

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.step);
    w.number(m.chunk);
    w.number(m.fresh);
  }
};

/// To server 0: everything that this worker pushes in `step` is held by all servers (synchronous), or applied.
struct Commit {
  static constexpr uint16_t kType = 14;
  uint64_t step = 0;
  std::vector<double> numbers;  ///< synchronous: added over members
  std::string record = {};      ///< synchronous: shown to all members

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.step);
    w.numbers(m.numbers, kMaxNumbers);
    w.text(m.record, kMaxRecord);
  }
};

/// Who takes part in a step, and what comes of their commits. The answer to Commit; also sent by a worker to a server 0
/// that started again and may not know it.
struct Decision {
  static constexpr uint16_t kType = 15;
  uint64_t step = 0;
  std::vector<uint32_t> members;          ///< ranks whose commits count, ascending
  std::vector<uint32_t> next_members;     ///< ranks that are expected in the next step, ascending
  std::vector<double> numbers;            ///< sums along the tree over ranks
  std::vector<std::string> records = {};  ///< by member; none where steps are not decided together

  bool operator==(const Decision&) const = default;

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.step);
    w.numbers(m.members, kMaxWorkers);
    w.numbers(m.next_members, kMaxWorkers);
    w.numbers(m.numbers, kMaxNumbers);
    w.list(m.records, kMaxWorkers, [](W& wire, auto& record) { wire.text(record, kMaxRecord); });
  }
};

/// Asks for the statistics of the sums of a step over `members`, once the server holds them all.
struct Sum {
  static constexpr uint16_t kType = 16;
  uint64_t step = 0;
  std::vector<uint32_t> members;

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.step);
    w.numbers(m.members, kMaxWorkers);
  }
};

/// Sums of squares by tile, chunk by chunk, piece by piece, of all chunks of the server.
struct Partials {
  static constexpr uint16_t kType = 17;
  std::vector<double> partials;

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.numbers(m.partials, kMaxNumbers);
  }
};

/// A batch of a pass over the job's `loader`-th prepared loader.
struct BatchId {
  uint32_t loader = 0;
  uint64_t epoch = 0;
  uint64_t batch = 0;

  bool operator==(const BatchId&) const = default;
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

  template <class M, class W>
  static void visit(M& m, W& w);
};

/// Asks server 0 for a batch of a pass.
struct Deal {
  static constexpr uint16_t kType = 26;
  uint64_t request = 0;  ///< ascends; a repeated one is answered as before
  uint32_t loader = 0;
  uint64_t epoch = 0;
  uint64_t batches = 0;  ///< of the pass
  bool ends = false;     ///< the worker leaves the pass: what it was dealt and has not finished goes to others
  std::vector<uint64_t> finished;  ///< of the pass, without a step

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.request);
    w.number(m.loader);
    w.number(m.epoch);
    w.number(m.batches);
    w.number(m.ends);
    w.numbers(m.finished, kMaxNumbers);
  }
};

struct Dealt {
  static constexpr uint16_t kType = 27;
  enum class State : uint8_t {
    dealt,  ///< `batch` is the worker's
    none,   ///< all are dealt, but not finished; ask again
    ended   ///< all are finished
  };
  State state = State::ended;
  uint64_t batch = 0;

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.state);
    w.number(m.batch);
  }
};

/// The first acknowledgement, `step`; and up to which step of this worker a snapshot holds everything, the second one.
struct Applied {
  static constexpr uint16_t kType = 19;
  uint64_t step = 0;
  uint64_t durable = 0;

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.step);
    w.number(m.durable);
  }
};

/// A sign of life.
struct Beat {
  static constexpr uint16_t kType = 20;
  bool wants_snapshot = false;

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.wants_snapshot);
  }
};

struct Beaten {
  static constexpr uint16_t kType = 21;
  uint64_t durable = 0;

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.durable);
  }
};

/// Asks how far each chunk is, after a connection was lost.
struct Recall {
  static constexpr uint16_t kType = 22;
  template <class M, class W>
  static void visit(M&, W&) {}
};

/// By chunk of the server, then by table, in order: the last step that is applied (of this worker, unless synchronous).
struct Recalled {
  static constexpr uint16_t kType = 23;
  std::vector<uint64_t> steps;

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.numbers(m.steps, kMaxNumbers);
  }
};

/// The worker ends in good order.
struct Leave {
  static constexpr uint16_t kType = 24;
  template <class M, class W>
  static void visit(M&, W&) {}
};

// --- rows of tables ------------------------------------------------------------------------------------------------
// Tables are named by their index in the plan, rows by their number in the table. A server is sent the rows alone that
// it has. Payloads are arrays, one after the other, of as many rows as fit: i64 numbers, then what each message says.

/// Of a part with so many bytes a row.
inline constexpr size_t rows_a_part(size_t row_bytes) noexcept {
  constexpr size_t kPartBytes = size_t{2} << 20;
  return row_bytes < kPartBytes ? kPartBytes / row_bytes : 1;
}

/// A part of one worker's sums of a table in a step: row numbers, strictly ascending over all parts, and f32 sums of
/// `dim` values a row. Parts come in order; a step without rows has one, empty. The answer is Pushed.
struct PushRows {
  static constexpr uint16_t kType = 28;
  uint64_t step = 0;
  uint32_t table = 0;
  uint32_t part = 0;
  uint32_t parts = 1;  ///< of the push

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.step);
    w.number(m.table);
    w.number(m.part);
    w.number(m.parts);
  }
};

/// Asks for values of rows (the payload: numbers in any order, which may repeat), once the table has made `at_least`
/// steps. `shares` and `place` as in Read. The answer is Values.
struct PullRows {
  static constexpr uint16_t kType = 29;
  uint32_t table = 0;
  uint64_t at_least = 0;
  bool shares = false;
  uint64_t place = 0;

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.table);
    w.number(m.at_least);
    w.number(m.shares);
    w.number(m.place);
  }
};

/// The chief's: row numbers, f32 values and f32 states, before Start.
struct WriteRows {
  static constexpr uint16_t kType = 30;
  uint32_t table = 0;

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.table);
  }
};

/// Likewise: how many steps the table's optimizer has counted.
struct WriteRowSteps {
  static constexpr uint16_t kType = 31;
  uint32_t table = 0;
  uint64_t steps = 0;

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.table);
    w.number(m.steps);
  }
};

/// Asks for the rows that the server keeps, from the `first`-th on, in an order that does not change but grows, once
/// the table has made `at_least` steps.
struct FetchRows {
  static constexpr uint16_t kType = 32;
  uint32_t table = 0;
  uint64_t at_least = 0;
  uint64_t first = 0;

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.table);
    w.number(m.at_least);
    w.number(m.first);
  }
};

/// Row numbers, f32 values and f32 states.
struct FetchedRows {
  static constexpr uint16_t kType = 33;
  uint64_t total = 0;  ///< rows that the server keeps
  uint64_t steps = 0;  ///< that the table's optimizer has counted

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.total);
    w.number(m.steps);
  }
};

/// Asks for the statistics of a table's sums of a step over `members`, from the `first`-th row on, once the server
/// holds what they push.
struct SumRows {
  static constexpr uint16_t kType = 34;
  uint64_t step = 0;
  std::vector<uint32_t> members;
  uint32_t table = 0;
  uint64_t first = 0;

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.step);
    w.numbers(m.members, kMaxWorkers);
    w.number(m.table);
    w.number(m.first);
  }
};

/// Row numbers, ascending, and the f64 partials of the tiles of each row; see kernels::grad_stats.
struct RowPartials {
  static constexpr uint16_t kType = 35;
  uint64_t total = 0;  ///< rows of the sums

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.number(m.total);
  }
};

/// A worker that another incarnation replaced, or that was declared dead.
class Fenced : public CommError {
 public:
  using CommError::CommError;
};

/// What an error becomes on its way to a worker, and there again.
Failure describe(const std::exception_ptr& error);
[[noreturn]] void raise(const Failure& failure);

template <class M, class W>
void visit_groups(M& groups, W& w);

// --- bodies that need the types above ------------------------------------------------------------------------------

namespace detail {

template <class G, class W>
void visit_group(G& g, W& w) {
  using Group = std::remove_const_t<G>;
  w.number(g.lr);
  if constexpr (std::is_same_v<Group, kernels::AdamGroup>) {
    w.number(g.beta1);
    w.number(g.beta2);
    w.number(g.eps);
    w.number(g.weight_decay);
    w.number(g.decoupled);
    w.number(g.amsgrad);
  } else if constexpr (std::is_same_v<Group, kernels::SgdGroup>) {
    w.number(g.momentum);
    w.number(g.dampening);
    w.number(g.weight_decay);
    w.number(g.nesterov);
  } else {
    w.number(g.lr_decay);
    w.number(g.eps);
    w.number(g.weight_decay);
  }
  w.number(g.maximize);
}

template <class M, class W>
void visit_parameter(M& m, W& w) {
  w.text(m.name, kMaxNameBytes);
  w.number(m.dtype);
  w.numbers(m.sizes, kMaxDims);
  w.numbers(m.strides, kMaxDims);
}

template <class M, class W>
void visit_table(M& m, W& w) {
  w.text(m.name, kMaxNameBytes);
  w.number(m.num_rows);
  w.number(m.dim);
  w.number(m.placement);
  w.number(m.initialiser.kind);
  w.number(m.initialiser.scale);
  w.number(m.initialiser.seed);
  w.number(m.group);
  w.number(m.row_wise_adagrad);
}

}  // namespace detail

template <class M, class W>
void visit_groups(M& groups, W& w) {
  auto kind = static_cast<uint8_t>(groups.index());
  w.number(kind);
  if constexpr (!std::is_const_v<M>) {
    WireReader::check(kind < std::variant_size_v<FlatGroups>, "an unknown optimizer");
    if (kind == 0) groups.template emplace<0>();
    if (kind == 1) groups.template emplace<1>();
    if (kind == 2) groups.template emplace<2>();
  }
  std::visit(
      [&](auto& list) { w.list(list, kMaxGroups, [](W& wire, auto& group) { detail::visit_group(group, wire); }); },
      groups);
}

template <class M, class W>
void Configure::visit(M& m, W& w) {
  w.number(m.server);
  auto& plan = m.plan;
  w.list(plan.parameters, kMaxParameters, [](W& wire, auto& parameter) { detail::visit_parameter(parameter, wire); });
  w.numbers(plan.group_of, kMaxParameters);
  w.list(plan.tables, kMaxTables, [](W& wire, auto& table) { detail::visit_table(table, wire); });
  visit_groups(plan.groups, w);
  w.number(plan.servers);
  w.number(plan.workers);
  w.number(plan.staleness);
  w.number(plan.chunk_bytes);
  w.number(plan.heartbeat_ms);
  w.number(plan.timeout_ms);
  w.number(plan.norm_type);
  w.number(m.job);
  w.text(m.facts, kMaxRecord);
}

template <class M, class W>
void Apply::visit(M& m, W& w) {
  w.number(m.step);
  w.numbers(m.members, kMaxWorkers);
  w.number(m.scalars.divisor);
  w.number(m.scalars.clip);
  w.number(m.scalars.norm);
  w.number(m.scalars.unit);
  w.number(m.scalars.finite);
  w.number(m.scalars.dropped);
  w.number(m.scalars.clip_value);
  visit_groups(m.groups, w);
  w.numbers(m.unused, kMaxParameters);
  w.list(m.batches, kMaxBatches, [](W& wire, auto& batch) {
    wire.number(batch.loader);
    wire.number(batch.epoch);
    wire.number(batch.batch);
  });
  w.numbers(m.unused_tables, kMaxTables);
}

}  // namespace muster::server
