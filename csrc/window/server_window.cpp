#include "window/server_window.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>

#include <algorithm>

#include "muster/error.h"
#include "optimizer/gradient_norm.h"
#include "server/protocol/wire.h"
#include "window/host_norm.h"
#include "window/host_window.h"

namespace muster {

namespace {

constexpr size_t kMaxIntegers = size_t{1} << 16;

/// What a worker shows the others at a window's end, besides the tail.
struct Record {
  std::string failure;  // "type\ntext"
  std::string metrics;
  std::vector<int64_t> integers;  // of integer buffers
  double buffer_share = 0;        // that its floating buffers have in the tail
  bool fresh = false;             // its buffers are no one else's
  bool watches = false;
  std::string report;  // JoinReport, encoded; empty unless asked for

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.text(m.failure, server::kMaxText);
    w.text(m.metrics, server::kMaxText);
    w.numbers(m.integers, kMaxIntegers);
    w.number(m.buffer_share);
    w.number(m.fresh);
    w.number(m.watches);
    w.text(m.report, server::kMaxRecord);
  }
};

}  // namespace

ServerWindow::ServerWindow(const WindowContext& context, const ServerJob& job)
    : context_(context),
      job_(job),
      numbers_(context.topology.devices.size(), context.options),
      buffers_(context.registry, context.topology.devices.size()) {}

void ServerWindow::connect(const FlatOptimizer& optimizer, const std::vector<int>& parameters,
                           const FlatGroups& groups) {
  const auto& registry = context_.registry;
  ServerParameters given;
  given.optimizer = &optimizer;
  given.groups = groups;
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
    const auto dtype = given.tensors.back().scalar_type();
    if (given.rows.back() != nullptr && dtype != at::kFloat) {
      throw InvalidArgument("embedding '" + registry.name(p) + "' has dtype " + c10::toString(dtype) +
                            ", and parameter servers keep rows of fp32; leave the module as it is built");
    }
  }
  exchange_ = std::make_unique<ServerExchange>(job_, context_.topology.rank, context_.topology.num_workers,
                                               context_.options, given);
  if (!context_.groups.joins() || !exchange_->is_synchronous()) return;
  joining_.begin();
  numbers_.note_unit();  // the others tell it
}

void ServerWindow::open() {
  exchange_->open();
  numbers_.open();
  buffers_.open();
}

void ServerWindow::weigh(int local_replica, double rows) {
  if (numbers_.has_unit()) return;
  const auto r = static_cast<size_t>(local_replica);
  auto& replicas = exchange_->is_synchronous() ? *context_.groups.workers : *context_.groups.control_of(r);
  if (const auto unit = guess_unit(replicas, rows)) numbers_.set_unit(r, *unit);
}

// A window that failed here pushes no rows: it changes nothing.
void ServerWindow::push_rows(const Failure& failure) {
  for (size_t p = 0; p < context_.sums.trainable().size(); ++p) {
    if (!exchange_->has_rows(p)) continue;
    exchange_->take_rows(p, failure ? at::Tensor() : context_.sums.engine(0).sparse_sum(p));
  }
}

ClosedWindow ServerWindow::close(int local_replica, const Closing& closing) {
  const auto r = static_cast<size_t>(local_replica);
  push_rows(closing.failure);
  auto closed = exchange_->is_synchronous()
                    ? close_together(closing)
                    : close_on_host(*context_.groups.gradients[r], context_, r, closing, numbers_, buffers_);
  if (closed.tail[Tail::failures] > 0) {
    const auto workers_before = static_cast<size_t>(context_.topology.first_replica);
    if (!exchange_->is_synchronous()) closed.failures.insert(closed.failures.begin(), workers_before, "");
    return closed;
  }
  if (closed.tail[Tail::weight] > 0) context_.sums.engine(r).learn_order(closed.tail.counts());
  return closed;
}

// The weight of this worker's floating buffers in the tail's sums.
double ServerWindow::buffer_share() const {
  if (joining_.state() == Joining::State::listening) return 0.0;
  if (context_.options.buffers != Buffers::chief) return numbers_.weight(0);
  return static_cast<int>(exchange_->expected().front()) == context_.topology.rank ? 1.0 : 0.0;
}

ClosedWindow ServerWindow::close_together(const Closing& closing) {
  const auto& failure = closing.failure;
  const double share = buffer_share();
  const auto tail = new_tail(context_, 0, closing, numbers_.losses(0), buffers_.num_doubles(0));
  if (!failure) numbers_.fill(tail, 0);
  buffers_.fill(tail, 0, share);
  const auto integers = buffers_.integers_of(0);
  Record mine;
  mine.failure = text_of(failure).substr(0, server::kMaxText);
  mine.metrics = failure ? std::string() : numbers_.metric_text(0);
  if (static_cast<size_t>(integers.numel()) > kMaxIntegers || mine.metrics.size() > server::kMaxText) {
    throw InvalidArgument("a window has more than " + std::to_string(kMaxIntegers) +
                          " elements of integer buffers, or more metrics than fit into 64 KiB, which workers of "
                          "parameter servers cannot show each other");
  }
  mine.integers.assign(integers.const_data_ptr<int64_t>(), integers.const_data_ptr<int64_t>() + integers.numel());
  mine.buffer_share = share;
  mine.fresh = joining_.state() == Joining::State::listening;
  mine.watches = joining_.watches();
  mine.report = joining_.tell(exchange_->since(), numbers_.unit(0), numbers_.scale().get());
  return hear(tail, integers, exchange_->agree(tail.tensor, server::encode(mine)));
}

ClosedWindow ServerWindow::hear(const Tail& tail, at::Tensor integers, const Records& records) {
  const bool chief_only = context_.options.buffers == Buffers::chief;
  ClosedWindow closed{tail, std::vector<std::string>(static_cast<size_t>(context_.topology.num_replicas))};
  std::vector<std::string> metrics;
  double shares = 0;
  bool has_integers = false;
  joining_.begin_hearing();
  for (const auto& [rank, bytes] : records) {
    auto record = server::decode<Record>(bytes);
    shares += record.buffer_share;
    if (record.watches) exchange_->leave_out(rank);
    joining_.hear(record.watches, record.report);
    closed.failures.at(rank) = std::move(record.failure);
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
  buffers_.set_integers(0, integers);
  numbers_.set_metric_texts(0, std::move(metrics));
  if (const auto* report = joining_.heard()) {
    numbers_.set_unit(0, report->unit);
    numbers_.scale().set(
        {.scale = static_cast<float>(report->loss_scale), .growth_tracker = static_cast<int>(report->growth_tracker)});
  }
  return closed;
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
  const auto loss_scale = numbers_.scale().on_host();
  if (exchange_->is_synchronous()) {
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
