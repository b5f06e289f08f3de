// A window whose parameters live on servers: its beginning, what workers agree on, and its end.
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "core/flat_layout.h"
#include "muster/error.h"
#include "server/protocol/wire.h"
#include "window/gradient_set.h"
#include "window/window_tail.h"

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
  std::string brief;

  template <class M, class W>
  static void visit(M& m, W& w) {
    w.text(m.failure, server::kMaxText);
    w.text(m.metrics, server::kMaxText);
    w.numbers(m.integers, kMaxIntegers);
    w.number(m.buffer_share);
    w.number(m.fresh);
    w.number(m.watches);
    w.text(m.brief, server::kMaxRecord);
  }
};

}  // namespace

void GradientSet::connect_servers(const FlatOptimizer& optimizer, const std::vector<int>& parameters,
                                  const FlatGroups& groups) {
  if (!groups_.servers) throw InvalidArgument("this strategy has no parameter servers; use ParameterServerStrategy");
  build_engines();
  ServerParameters given;
  given.optimizer = &optimizer;
  given.groups = groups;
  for (const int index : trainable_) {
    const auto found = std::find(parameters.begin(), parameters.end(), index);
    const auto p = static_cast<size_t>(index);
    if (found == parameters.end()) {
      throw InvalidArgument("parameter '" + registry_.name(p) +
                            "' belongs to another optimizer, and parameter servers step one; give all parameters of "
                            "a step to one optimizer, as groups of it");
    }
    given.names.push_back(registry_.name(p));
    given.tensors.push_back(registry_.parameter(0, p));
    given.position.push_back(static_cast<size_t>(found - parameters.begin()));
    given.group_of.push_back(optimizer.group(given.position.back()));
    given.rows.push_back(registry_.rows_of(p));
    const auto dtype = given.tensors.back().scalar_type();
    if (given.rows.back() != nullptr && dtype != at::kFloat) {
      throw InvalidArgument("embedding '" + registry_.name(p) + "' has dtype " + c10::toString(dtype) +
                            ", and parameter servers keep rows of fp32; leave the module as it is built");
    }
  }
  servers_ = std::make_unique<ServerWindow>(*groups_.servers, topology_.rank, topology_.num_workers, options_, given);
  if (!groups_.joins() || !servers_->is_synchronous()) return;
  watches_ = is_fresh_ = true;
  has_unit_ = true;  // which the others tell
}

std::optional<Brief> GradientSet::learn(bool stepped) {
  const bool is_told = stepped && !was_fresh_ && heard_;
  if (has_elders_ && !is_told) return std::nullopt;
  watches_ = is_fresh_ = false;
  return std::exchange(heard_, std::nullopt);
}

// None of a window that failed here: it changes nothing.
void GradientSet::push_rows(const Failure& failure) {
  for (size_t p = 0; p < trainable_.size(); ++p) {
    if (servers_->has_rows(p)) servers_->take_rows(p, failure ? at::Tensor() : engines_.front()->sparse_sum(p));
  }
}

void GradientSet::close_on_servers(const Tail& tail, const Failure& failure) {
  auto& window = windows_.front();
  const bool chief_only = options_.buffers == Buffers::chief;
  const uint32_t chief = servers_->expected().front();
  const double chief_share = static_cast<int>(chief) == topology_.rank ? 1.0 : 0.0;
  const double share = is_fresh_ ? 0.0 : chief_only ? chief_share : window.weight;
  fill_tail(0, tail, failure, share);
  auto integers = integers_of(0);
  Record mine;
  if (failure) mine.failure = (failure.type + '\n' + failure.text).substr(0, server::kMaxText);
  mine.metrics = failure ? std::string() : metrics_of(0);
  if (static_cast<size_t>(integers.numel()) > kMaxIntegers || mine.metrics.size() > server::kMaxText) {
    throw InvalidArgument("a window has more than " + std::to_string(kMaxIntegers) +
                          " elements of integer buffers, or more metrics than fit into 64 KiB, which workers of "
                          "parameter servers cannot show each other");
  }
  mine.integers.assign(integers.const_data_ptr<int64_t>(), integers.const_data_ptr<int64_t>() + integers.numel());
  mine.buffer_share = share;
  mine.fresh = was_fresh_ = is_fresh_;
  mine.watches = watches_;
  if (is_asked()) {
    brief_.since = servers_->since();
    brief_.unit = window.unit;
    brief_.loss_scale = static_cast<double>(loss_scale_.scale);
    brief_.growth_tracker = static_cast<uint32_t>(loss_scale_.growth_tracker);
    mine.brief = server::encode(brief_);
  }
  const auto records = servers_->agree(tail.tensor, server::encode(mine));
  window.tail = tail.tensor;
  window.failures.assign(static_cast<size_t>(topology_.num_replicas), {});
  double shares = 0;
  bool has_integers = false;
  is_asked_ = has_elders_ = false;
  heard_.reset();
  for (const auto& [rank, bytes] : records) {
    auto record = server::decode<Record>(bytes);
    shares += record.buffer_share;
    is_asked_ |= record.watches;
    has_elders_ |= !record.watches;
    if (record.watches) servers_->leave_out(rank);
    if (!record.brief.empty()) {
      auto brief = server::decode<Brief>(record.brief);
      if (!heard_ || brief.since < heard_->since) heard_ = std::move(brief);
    }
    window.failures.at(rank) = std::move(record.failure);
    if (!record.metrics.empty()) window.metric_texts.push_back(std::move(record.metrics));
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
  adopts_ = is_fresh_ && shares > 0;
  window.integer_buffers = std::move(integers);
  if (!watches_ || !heard_) return;
  window.unit = heard_->unit;
  loss_scale_ = {.scale = static_cast<float>(heard_->loss_scale),
                 .growth_tracker = static_cast<int>(heard_->growth_tracker)};
}

// Servers must end the window, too.
void GradientSet::end_unchanged() {
  if (servers_) servers_->skip();
}

void GradientSet::check_dense(const Tail& tail) {
  const double* const sparse = tail.counts() + trainable_.size();
  for (size_t p = 0; p < trainable_.size(); ++p) {
    if (sparse[p] <= 0 || servers_->has_rows(p)) continue;
    drop_window();
    end_unchanged();
    throw InvalidArgument("parameter '" + engines_.front()->parameters()[p].name +
                          "' has a sparse gradient, which parameter servers take of a muster ShardedEmbedding alone; "
                          "use one, or build the embedding with sparse=False");
  }
}

bool GradientSet::is_used_on_servers(const Tail& tail, size_t parameter) const {
  return tail.counts()[servers_->has_rows(parameter) ? trainable_.size() + parameter : parameter] > 0;
}

void GradientSet::step_on_servers(const Tail& tail, const FlatGroups& groups) {
  std::vector<size_t> unused;
  for (size_t p = 0; p < trainable_.size(); ++p) {
    if (!is_used_on_servers(tail, p)) unused.push_back(p);
  }
  servers_->step(scalars_, groups, unused);
}

}  // namespace muster
