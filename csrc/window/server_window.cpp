#include "window/server_window.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>

#include <algorithm>
#include <exception>

#include "comm/peer_memory.h"
#include "core/wait_hook.h"
#include "embedding/row_source.h"
#include "muster/error.h"
#include "optimizer/gradient_norm.h"
#include "server/protocol/plan.h"
#include "server/protocol/wire.h"
#include "window/host_norm.h"
#include "window/host_window.h"

namespace muster {

namespace {

constexpr size_t kMaxIntegers = size_t{1} << 16;
constexpr size_t kMaxReplicas = 1024;  // of a worker

/// What a worker shows the others at a window's end, besides the tail.
struct Record {
  std::vector<std::string> failures;  // "type\ntext" or empty, by replica of the worker; none where none failed
  std::string metrics;                // of all its replicas, in order
  std::vector<int64_t> integers;      // of integer buffers
  double buffer_share = 0;            // that its floating buffers have in the tail
  bool fresh = false;                 // its buffers are no one else's
  bool watches = false;
  std::string report;  // JoinReport, encoded; empty unless asked for

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.list(m.failures, kMaxReplicas, [](W& wire, auto& text) { wire.text(text, server::kMaxText); });
    w.text(m.metrics, server::kMaxText);
    w.numbers(m.integers, kMaxIntegers);
    w.number(m.buffer_share);
    w.number(m.fresh);
    w.number(m.watches);
    w.text(m.report, server::kMaxRecord);
  }
};

// Before anything is pushed: a window that the others are in could not be closed.
void check_integers_fit(const ParameterRegistry& registry) {
  const auto& buffers = registry.buffers(0);
  size_t total = 0;
  size_t largest = 0;
  const auto size_of = [&](size_t b) { return is_averaged(buffers[b]) ? 0 : static_cast<size_t>(buffers[b].numel()); };
  for (size_t b = 0; b < buffers.size(); ++b) {
    total += size_of(b);
    if (size_of(b) > size_of(largest)) largest = b;
  }
  if (total <= kMaxIntegers) return;
  throw InvalidArgument("integer and bool buffers have " + std::to_string(total) + " elements, '" +
                        registry.buffer_names()[largest] + "' " + std::to_string(size_of(largest)) +
                        " of them, and synchronous workers of parameter servers show each other at most " +
                        std::to_string(kMaxIntegers) +
                        "; keep what is constant (a mask) as a plain attribute or make it in forward, or use a "
                        "staleness or MultiWorkerMirroredStrategy");
}

// As many bytes of UTF-8, or less: characters stay whole.
std::string beginning_of(const std::string& text, size_t most) {
  size_t end = std::min(text.size(), most);
  while (end > 0 && end < text.size() && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end);
}

}  // namespace

ServerWindow::ServerWindow(const WindowContext& context, const ServerJob& job)
    : context_(context),
      job_(job),
      numbers_(context.topology.devices.size(), context.options),
      buffers_(context.registry, context.topology.devices.size(), /*merges=*/true) {}

void ServerWindow::connect(FlatOptimizer& optimizer, const std::vector<int>& parameters, const FlatGroups& groups) {
  const auto& registry = context_.registry;
  if (job_.staleness == 0) check_integers_fit(registry);
  ServerParameters given;
  given.optimizer = &optimizer;
  given.groups = groups;
  std::vector<size_t> without_rows;  // here, by position
  for (const int index : context_.sums.trainable()) {
    const auto found = std::find(parameters.begin(), parameters.end(), index);
    const auto p = static_cast<size_t>(index);
    if (found == parameters.end()) {
      throw InvalidArgument("parameter '" + registry.name(p) +
                            "' belongs to another optimizer, and parameter servers step one; give all parameters of "
                            "a step to one optimizer, as groups of it");
    }
    given.names.push_back(registry.name(p));
    given.tensors.push_back(registry.parameter(0, p));
    given.position.push_back(static_cast<size_t>(found - parameters.begin()));
    given.group_of.push_back(optimizer.group(given.position.back()));
    given.rows.push_back(registry.rows_of(p));
    if (is_row_stub(given.tensors.back())) {
      without_rows.push_back(given.position.back());
    } else {
      optimizer.state().follow(given.position.back());  // before servers take it
    }
    const auto dtype = given.tensors.back().scalar_type();
    if (given.rows.back() != nullptr && dtype != at::kFloat) {
      throw InvalidArgument("embedding '" + registry.name(p) + "' has dtype " + c10::toString(dtype) +
                            ", and parameter servers keep rows of fp32; leave the module as it is built");
    }
  }
  exchange_ = std::make_unique<ServerExchange>(job_, context_.topology.rank, context_.topology.num_workers,
                                               context_.options, given);
  // Rows have their state on servers alone: torch's Adagrad makes one for all of a weight when it is built.
  for (const size_t position : without_rows) optimizer.state().reset(position);
  if (!context_.groups.joins() || !exchange_->plan().is_synchronous()) return;
  joining_.begin();
  numbers_.note_unit();  // the others tell it
}

void ServerWindow::open() {
  if (job_.staleness == 0) check_integers_fit(context_.registry);  // of what was prepared since, too
  exchange_->open();
  numbers_.open();
  buffers_.open();
}

// Replica 0 calls this in the place of all. What goes wrong there ends the others' wait for it, and what ends the
// others, its own.
template <class F>
void ServerWindow::speak(const F& call) {
  auto& replicas = *context_.groups.gradients.front();
  if (replicas.size() == 1) return call();
  const WaitHook hook([&replicas] {
    if (replicas.peer_memory() == nullptr || !replicas.peer_memory()->has_ended()) return;
    throw CommError("the other replicas of this worker no longer wait for what it heard from the parameter servers");
  });
  try {
    call();
  } catch (const std::exception& error) {
    replicas.abort(std::string("replica 0 of this worker, which speaks to the parameter servers for all, failed: ") +
                   error.what());
    throw;
  }
}

void ServerWindow::take(size_t parameter, const at::Tensor& sums) {
  speak([&] { exchange_->take(parameter, sums); });
}

void ServerWindow::weigh(int local_replica, double rows) {
  if (numbers_.has_unit()) return;
  const auto r = static_cast<size_t>(local_replica);
  auto& here = *context_.groups.control_of(r);
  auto& workers = *context_.groups.workers;
  const auto parts = usual_part(rows);
  here.all_reduce(parts, ReduceOp::sum).wait();
  if (exchange_->plan().is_synchronous() && workers.size() > 1) {
    if (r == 0) speak([&] { workers.all_reduce(parts, ReduceOp::sum).wait(); });
    here.broadcast(parts, 0).wait();
  }
  if (const auto unit = unit_of(parts)) numbers_.set_unit(r, *unit);
}

// A window that failed here pushes no rows: it changes nothing.
void ServerWindow::push_rows(bool has_failed) {
  for (size_t p = 0; p < context_.sums.trainable().size(); ++p) {
    if (!exchange_->has_rows(p)) continue;
    exchange_->take_rows(p, has_failed ? at::Tensor() : context_.sums.engine(0).sparse_sum(p));
  }
}

ClosedWindow ServerWindow::close(int local_replica, const Closing& closing) {
  const auto r = static_cast<size_t>(local_replica);
  auto& replicas = *context_.groups.gradients[r];
  auto& engine = context_.sums.engine(r);
  auto closed = close_on_host(replicas, context_, r, closing, share_of(r), numbers_, buffers_);
  const bool has_failed = closed.tail[Tail::failures] > 0;
  if (!has_failed && replicas.size() > 1) engine.reduce_sparse(closed.tail.counts());
  const bool steps_together = exchange_->plan().is_synchronous();
  if (r == 0) {
    speak([&] {
      push_rows(has_failed);
      if (steps_together) agree(closed);
    });
  }
  if (steps_together && replicas.size() > 1) replicas.broadcast(closed.tail.tensor, 0).wait();
  if (closed.tail[Tail::failures] > 0) {
    const auto replicas_before = static_cast<size_t>(context_.topology.first_replica);
    if (!steps_together) closed.failures.insert(closed.failures.begin(), replicas_before, "");
    return closed;
  }
  if (closed.tail[Tail::weight] > 0) engine.learn_order(closed.tail.counts());
  return closed;
}

// The weight of a replica's averaged buffers in the tail's sums: of the chief's alone, those of the first replica of
// the first worker that is expected.
double ServerWindow::share_of(size_t r) const {
  if (joining_.state() == Joining::State::listening) return 0.0;
  const bool is_chief =
      !exchange_->plan().is_synchronous() || static_cast<int>(exchange_->expected().front()) == context_.topology.rank;
  if (context_.options.buffers == Buffers::chief && !is_chief) return 0.0;
  return buffer_share(*context_.groups.gradients[r], context_, r, numbers_);
}

// Shows the others what this worker's replicas have together, and takes theirs in.
void ServerWindow::agree(ClosedWindow& closed) {
  const auto& tail = closed.tail;
  const auto& integers = buffers_.reduced_integers(0);
  Record mine;
  const auto has_failed = [](const std::string& text) { return !text.empty(); };
  const auto failed = static_cast<size_t>(std::ranges::count_if(closed.failures, has_failed));
  for (const auto& text : closed.failures) {
    mine.failures.push_back(beginning_of(text, server::kMaxText / std::max(failed, size_t{1})));
  }
  for (const auto& text : numbers_.metric_texts(0)) mine.metrics += text;
  if (static_cast<size_t>(integers.numel()) > kMaxIntegers || mine.metrics.size() > server::kMaxText) {
    throw InvalidArgument("a window has more than " + std::to_string(kMaxIntegers) +
                          " elements of integer buffers, or more metrics than fit into 64 KiB, which workers of "
                          "parameter servers cannot show each other");
  }
  mine.integers.assign(integers.const_data_ptr<int64_t>(), integers.const_data_ptr<int64_t>() + integers.numel());
  const bool is_listening = joining_.state() == Joining::State::listening;
  mine.buffer_share = context_.options.buffers == Buffers::chief || is_listening ? share_of(0) : tail[Tail::weight];
  mine.fresh = is_listening;
  mine.watches = joining_.watches();
  mine.report = joining_.tell(exchange_->since(), numbers_.unit(0), numbers_.scale().get());
  closed.failures = hear(tail, integers, exchange_->agree(tail.tensor, server::encode(mine)));
}

std::vector<std::string> ServerWindow::hear(const Tail& tail, at::Tensor integers, const Records& records) {
  const auto& topology = context_.topology;
  const bool chief_only = context_.options.buffers == Buffers::chief;
  std::vector<std::string> failures(static_cast<size_t>(topology.num_replicas));
  std::vector<std::string> metrics;
  double shares = 0;
  bool has_integers = false;
  joining_.begin_hearing();
  for (const auto& [rank, bytes] : records) {
    auto record = server::decode<Record>(bytes);
    shares += record.buffer_share;
    if (record.watches) exchange_->leave_out(rank);
    joining_.hear(record.watches, record.report);
    auto first = static_cast<size_t>(topology.first_replica_of(static_cast<int>(rank)));
    for (auto& text : record.failures) failures.at(first++) = std::move(text);
    if (!record.metrics.empty()) metrics.push_back(std::move(record.metrics));
    const auto theirs =
        at::from_blob(record.integers.data(), {static_cast<int64_t>(record.integers.size())}, at::kLong);
    if (record.fresh || (chief_only && record.buffer_share == 0)) continue;
    if (has_integers) {
      at::maximum_out(integers, integers, theirs);
    } else {
      integers.copy_(theirs);
    }
    has_integers = true;
  }
  // A chief that died leaves no values.
  if (chief_only && shares == 0) std::fill_n(tail.written(), tail.num_buffers, 0.0);
  adopts_ = joining_.state() == Joining::State::listening && shares > 0;
  numbers_.set_metric_texts(0, std::move(metrics));
  if (const auto* report = joining_.heard()) {
    numbers_.set_unit(0, report->unit);
    numbers_.scale().set(
        {.scale = static_cast<float>(report->loss_scale), .growth_tracker = static_cast<int>(report->growth_tracker)});
  }
  return failures;
}

void ServerWindow::check_dense(const Tail& tail) {
  for (size_t p = 0; p < context_.sums.trainable().size(); ++p) {
    if (tail.sparse_counts()[p] <= 0 || exchange_->has_rows(p)) continue;
    context_.sums.clear();
    exchange_->skip();
    throw InvalidArgument("parameter '" + context_.sums.engine(0).parameters()[p].name +
                          "' has a sparse gradient, which parameter servers take of a muster ShardedEmbedding alone; "
                          "use one, or build the embedding with sparse=False");
  }
}

bool ServerWindow::is_used(const Tail& tail, size_t parameter) const {
  return (exchange_->has_rows(parameter) ? tail.sparse_counts() : tail.counts())[parameter] > 0;
}

// Servers must end every window, whatever becomes of it here: a step that is neither applied nor skipped would be
// missing from all later ones.
void ServerWindow::finish(const Tail& tail, bool /*fused*/, WindowSums& sums) {
  numbers_.take_unit();
  if (sums.ends_unchanged()) return exchange_->skip();
  check_dense(tail);
  numbers_.read(tail, sums);
  auto& scalars = numbers_.scalars();
  const auto loss_scale = numbers_.scale().on_host().scale;
  if (exchange_->plan().is_synchronous()) {
    finish_norm(exchange_->norm_sum(), tail.data(), window_options(context_.options, loss_scale), scalars);
  } else {
    take_host_norm(context_, tail, loss_scale, scalars);
  }
  sums.grad_norm = scalars.norm;
  sums.finite = scalars.finite != 0;
  if (!sums.finite) exchange_->skip();
  merge_host_buffers(context_, tail, adopts_, buffers_);
  if (adopts_) joining_.note_buffers();
  numbers_.end(tail, sums.finite);
}

// Means are on the servers alone: hooks see no gradients, and what they change nobody steps from.
kernels::StepScalars* ServerWindow::leave_means(const Tail& /*tail*/, const std::function<void()>& edit) {
  edit();
  return &numbers_.scalars();
}

void ServerWindow::update(const Tail& tail, FlatOptimizer& /*optimizer*/, const std::vector<int>& /*parameters*/,
                          const FlatGroups& groups, const OnReplicas& /*on_replicas*/) {
  const at::NoGradGuard no_grad;
  std::vector<size_t> unused;
  for (size_t p = 0; p < context_.sums.trainable().size(); ++p) {
    if (!is_used(tail, p)) unused.push_back(p);
  }
  exchange_->step(numbers_.scalars(), groups, unused);
}

}  // namespace muster
