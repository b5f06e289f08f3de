#include "window/server_window.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <span>
#include <utility>

#include "core/ownership.h"
#include "embedding/row_source.h"
#include "muster/error.h"
#include "server/protocol/chunk_parts.h"

namespace muster {

namespace {

using server::Part;

constexpr kernels::StepScalars kNothing{.divisor = 1, .clip = 1, .norm = 0, .unit = 1, .finite = 1, .dropped = 1};
constexpr std::byte kGap[FlatLayout::kSlotAlignment]{};

server::Plan plan_of(const ServerJob& job, int workers, const StrategyOptions& options, const ServerParameters& given) {
  server::Plan plan;
  for (size_t p = 0; p < given.tensors.size(); ++p) {
    const auto& tensor = given.tensors[p];
    if (given.rows[p] != nullptr) {
      plan.tables.push_back({.name = given.names[p],
                             .num_rows = tensor.size(0),
                             .dim = tensor.size(1),
                             .placement = given.rows[p]->placement,
                             .initialiser = given.rows[p]->initialiser,
                             .group = given.group_of[p],
                             .row_wise_adagrad = given.rows[p]->row_wise_adagrad});
      continue;
    }
    plan.parameters.push_back({given.names[p], tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()});
    plan.group_of.push_back(given.group_of[p]);
  }
  plan.groups = given.groups;
  plan.servers = static_cast<uint32_t>(job.channels.size());
  plan.workers = static_cast<uint32_t>(workers);
  plan.staleness = job.staleness;
  plan.timeout_ms = static_cast<uint32_t>(std::min(options.timeout * 1000, 4e9));
  plan.norm_type = options.clip_norm_type;
  return plan;
}

server::ClientConfig client_of(const ServerJob& job, int rank, const server::Plan& plan) {
  server::ClientConfig config;
  config.servers = job.channels;
  config.rank = static_cast<uint32_t>(rank);
  config.plan = plan;
  config.job = job.id;
  auto facts = job.facts;
  facts.row_seeds.clear();
  for (const auto& table : plan.tables) facts.row_seeds.emplace_back(table.name, table.initialiser.seed);
  config.facts = server::encode(facts);
  return config;
}

template <class T>
std::span<T> values_of(const at::Tensor& tensor) {
  return {tensor.mutable_data_ptr<T>(), static_cast<size_t>(tensor.numel())};
}

std::byte* bytes_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); }

// What there is of a parameter; undefined where there is nothing.
at::Tensor part_of(const at::Tensor& parameter, const FlatOptimizer& optimizer, size_t position, Part part) {
  switch (part) {
    case Part::parameter:
      return parameter;
    case Part::steps:
      return optimizer.step_count(position);
    case Part::master: {
      const auto& master = optimizer.master(position);
      // One that is not the parameter's was never filled, or is older than it.
      const bool is_stale = master.defined() && !master.to(parameter.scalar_type()).equal(parameter);
      return is_stale ? parameter.detach().to(master.scalar_type()) : master;
    }
    default:
      return optimizer.state(position, static_cast<size_t>(part) - static_cast<size_t>(Part::state0));
  }
}

}  // namespace

ServerWindow::ServerWindow(const ServerJob& job, int rank, int workers, const StrategyOptions& options,
                           const ServerParameters& given)
    : plan_(plan_of(job, workers, options, given)),
      rank_(static_cast<uint32_t>(rank)),
      joins_(job.joins),
      groups_(given.groups),
      client_(client_of(job, rank, plan_)),
      chunks_of_(plan_.parameters.size()),
      sums_(plan_.parameters.size()) {
  for (size_t p = 0; p < given.tensors.size(); ++p) {
    const auto& parameter = given.tensors[p];
    const bool is_table = given.rows[p] != nullptr;
    places_.push_back({is_table, is_table ? tables_.size() : parameters_.size()});
    if (is_table) {
      tables_.push_back({parameter, 0, !is_row_stub(parameter), nullptr});
      continue;
    }
    dense_.push_back(p);
    parameters_.push_back(parameter);
    const bool is_dense = parameter.is_non_overlapping_and_dense();
    strides_.push_back(is_dense ? parameter.strides().vec() : c10::TensorType::contiguousStridesOf(parameter.sizes()));
  }
  for (uint32_t c = 0; c < client_.chunks().size(); ++c) {
    landing_.push_back(client_.allocate(client_.part_bytes(c, Part::parameter)));
    for (const auto& piece : client_.chunks()[c].pieces) chunks_of_[static_cast<size_t>(piece.parameter)].push_back(c);
  }
  missing_.resize(landing_.size());
  for (int r = 0; r < workers; ++r) decision_.next_members.push_back(static_cast<uint32_t>(r));
  connect(given, rank == server::kChief);
}

ServerWindow::~ServerWindow() {
  try {
    client_.leave();
  } catch (const std::exception&) {
    return;  // servers know by the silence
  }
}

void ServerWindow::connect(const ServerParameters& given, bool is_chief) {
  const at::NoGradGuard no_grad;
  if (is_chief && !client_.is_started()) {
    for (const auto part : {Part::parameter, Part::state0, Part::state1, Part::state2, Part::master, Part::steps}) {
      give(given, part);
    }
    give_rows(given);
    client_.start();
  }
  step_ = client_.join();
  since_ = step_;
  // What was decided may not be made yet.
  client_.read(Part::parameter, joins_ && is_synchronous() ? step_ : 0, landing_);
  take_values();
  leave_rows();
}

// The part of every chunk, where the optimizer has it.
void ServerWindow::give(const ServerParameters& given, Part part) {
  for (uint32_t c = 0; c < client_.chunks().size(); ++c) {
    const auto& chunk = client_.chunks()[c];
    at::Tensor values;
    for (size_t i = 0; i < chunk.pieces.size(); ++i) {
      const auto& piece = chunk.pieces[i];
      const auto p = static_cast<size_t>(piece.parameter);
      const auto whole = part_of(parameters_[p], *given.optimizer, given.position[dense_[p]], part);
      if (!whole.defined()) continue;
      if (!values.defined()) values = at::zeros({server::numel_of(chunk, part)}, server::dtype_of(chunk, part));
      const auto [offset, count] = server::place_of(chunk, i, part);
      const auto place = values.narrow(0, offset, count);
      place.copy_(part == Part::steps ? whole.view({1}) : elements_of(flat_of(p, whole), piece.run));
    }
    if (values.defined()) client_.write(c, part, {bytes_of(values), values.nbytes()});
  }
}

// `values` of a parameter in the memory order of its slot.
at::Tensor ServerWindow::flat_of(size_t parameter, at::Tensor values) const {
  if (values.strides() == at::IntArrayRef(strides_[parameter])) return values;
  return at::empty_strided(values.sizes(), strides_[parameter], values.options().requires_grad(false))
      .copy_(values.detach());
}

void ServerWindow::open() {
  if (is_open_)
    throw CommError("a window was cut short by an error, so that servers hold half of it; start the job again");
  const auto check = [](const std::string& name, bool was_written) {
    if (!was_written) return;
    throw InvalidArgument("parameter '" + name +
                          "' was written outside step(), where the parameter servers, which hold it, do not see it; "
                          "change parameters before the first step, or under another strategy");
  };
  for (size_t p = 0; p < parameters_.size(); ++p) {
    check(plan_.parameters[p].name, trace_of(parameters_[p]) != traces_[p]);
  }
  for (size_t t = 0; t < tables_.size(); ++t) {
    const auto& weight = tables_[t].weight;
    check(plan_.tables[t].name, weight._version() != tables_[t].version || !is_row_stub(weight));
  }
  for (size_t c = 0; c < missing_.size(); ++c) missing_[c] = client_.chunks()[c].pieces.size();
}

void ServerWindow::take(size_t parameter, const at::Tensor& sums) {
  is_open_ = true;
  const size_t p = places_[parameter].index;
  sums_[p] = sums;
  for (const uint32_t chunk : chunks_of_[p]) {
    if (--missing_[chunk] == 0) push(chunk);
  }
}

void ServerWindow::take_rows(size_t parameter, const at::Tensor& sums) {
  is_open_ = true;
  const auto table = static_cast<uint32_t>(places_[parameter].index);
  if (!sums.defined()) return client_.push_rows(step_ + 1, table, {}, {});
  const auto rows = sums._indices().view({-1}).contiguous();
  const auto values = sums._values().contiguous();
  client_.push_rows(step_ + 1, table, values_of<int64_t>(rows), values_of<float>(values));
}

void ServerWindow::push(uint32_t c) {
  const auto& chunk = client_.chunks()[c];
  const auto size = c10::elementSize(chunk.gradient);
  std::vector<server::Bytes> pieces;
  const auto owner = std::make_shared<std::vector<at::Tensor>>();
  size_t end = 0;
  const auto fill_up_to = [&](size_t byte) {
    if (byte > end) pieces.emplace_back(kGap, byte - end);
    end = byte;
  };
  for (const auto& piece : chunk.pieces) {
    const auto run = elements_of(sums_[static_cast<size_t>(piece.parameter)], piece.run);
    fill_up_to(static_cast<size_t>(piece.offset) * size);
    pieces.emplace_back(bytes_of(run), run.nbytes());
    owner->push_back(run);
    end += run.nbytes();
  }
  fill_up_to(static_cast<size_t>(chunk.gradient_bytes()));
  client_.push(step_ + 1, c, pieces, owner);
}

std::vector<std::pair<uint32_t, std::string>> ServerWindow::agree(const at::Tensor& tail, std::string record) {
  const std::span<const double> mine(tail.const_data_ptr<double>(), static_cast<size_t>(tail.numel()));
  client_.flush();
  decision_ = client_.commit(step_ + 1, {mine.begin(), mine.end()}, std::move(record));
  givers_ = decision_.members;
  has_lost_ = has_lost_ || decision_.next_members.size() < plan_.workers;
  std::copy(decision_.numbers.begin(), decision_.numbers.end(), tail.mutable_data_ptr<double>());
  std::vector<std::pair<uint32_t, std::string>> records;
  for (size_t m = 0; m < decision_.members.size(); ++m) {
    records.emplace_back(decision_.members[m], decision_.records[m]);
  }
  return records;
}

std::vector<double> ServerWindow::partials(const std::function<bool(size_t parameter)>& is_used) {
  const auto all = client_.sum(step_ + 1, decision_.members);
  // Where the tiles of each parameter of the plan begin: chunks have them in order.
  std::vector<size_t> tiles(parameters_.size() + 1);
  for (const auto& chunk : client_.chunks()) {
    for (const auto& piece : chunk.pieces) {
      tiles[static_cast<size_t>(piece.parameter) + 1] += kernels::num_tiles(static_cast<size_t>(piece.run.count));
    }
  }
  std::partial_sum(tiles.begin(), tiles.end(), tiles.begin());
  std::vector<double> used;
  for (size_t p = 0; p < places_.size(); ++p) {
    if (!is_used(p)) continue;
    const size_t i = places_[p].index;
    if (places_[p].is_table) {
      used.insert(used.end(), all.tables[i].begin(), all.tables[i].end());
    } else {
      const auto first = all.chunks.begin();
      used.insert(used.end(), first + static_cast<ptrdiff_t>(tiles[i]), first + static_cast<ptrdiff_t>(tiles[i + 1]));
    }
  }
  return used;
}

server::Apply ServerWindow::command(const kernels::StepScalars& scalars) const {
  server::Apply apply;
  apply.step = step_ + 1;
  apply.members = is_synchronous() ? decision_.members : std::vector<uint32_t>{rank_};
  apply.scalars = scalars;
  apply.groups = groups_;
  apply.batches = batches_;
  return apply;
}

void ServerWindow::step(const kernels::StepScalars& scalars, const FlatGroups& groups,
                        const std::vector<size_t>& unused) {
  groups_ = groups;
  auto apply = command(scalars);
  for (const size_t parameter : unused) {
    const auto [is_table, index] = places_[parameter];
    (is_table ? apply.unused_tables : apply.unused).push_back(static_cast<uint32_t>(index));
  }
  finish(apply, /*changes=*/true);
}

void ServerWindow::skip() { finish(command(kNothing), /*changes=*/false); }

void ServerWindow::note_batches(const std::vector<server::BatchId>& batches) {
  batches_.insert(batches_.end(), batches.begin(), batches.end());
}

server::Dealt ServerWindow::deal(uint32_t loader, uint64_t epoch, uint64_t batches, std::vector<uint64_t> finished) {
  const auto& begun = client_.passes_at_join();
  const bool is_left = joins_ && std::any_of(begun.begin(), begun.end(), [&](const server::PassId& pass) {
                         return pass.loader == loader && pass.epoch > epoch;
                       });
  if (is_left) return {server::Dealt::State::ended, 0};
  return client_.deal(loader, epoch, batches, std::move(finished));
}

void ServerWindow::end_pass(uint32_t loader, uint64_t epoch, uint64_t batches, std::vector<uint64_t> finished) {
  client_.end_pass(loader, epoch, batches, std::move(finished));
}

void ServerWindow::refresh() {
  if (is_synchronous()) return;
  client_.read(Part::parameter, 0, landing_);
  take_values();
}

void ServerWindow::finish(const server::Apply& apply, bool changes) {
  if (!is_synchronous()) {
    client_.flush();
    client_.apply(apply);
    client_.commit(apply.step, {});
  } else if (changes) {
    client_.apply_and_read(apply, landing_);
  } else {
    client_.apply(apply);
  }
  step_ = apply.step;
  is_open_ = false;
  batches_.clear();
  if (is_synchronous() && changes) take_values();
  refresh();
}

// From where servers wrote them into the parameters.
void ServerWindow::take_values() {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> dense;
  for (size_t p = 0; p < parameters_.size(); ++p) {
    const auto& parameter = parameters_[p];
    dense.push_back(parameter.is_non_overlapping_and_dense()
                        ? parameter.detach()
                        : at::empty_strided(parameter.sizes(), strides_[p], parameter.options().requires_grad(false)));
  }
  const auto& chunks = client_.chunks();
  at::parallel_for(0, static_cast<int64_t>(chunks.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      const auto& chunk = chunks[static_cast<size_t>(c)];
      const auto size = static_cast<int64_t>(c10::elementSize(chunk.dtype));
      for (const auto& piece : chunk.pieces) {
        std::memcpy(bytes_of(dense[static_cast<size_t>(piece.parameter)]) + piece.run.begin * size,
                    landing_[static_cast<size_t>(c)] + piece.offset * size,
                    static_cast<size_t>(piece.run.count * size));
      }
    }
  });
  traces_.resize(parameters_.size());
  for (size_t p = 0; p < parameters_.size(); ++p) {
    if (!parameters_[p].is_non_overlapping_and_dense()) {
      parameters_[p].detach().copy_(dense[p]);
    } else {
      parameters_[p].unsafeGetTensorImpl()->bump_version();
    }
    traces_[p] = trace_of(parameters_[p]);
  }
}

ServerWindow::Trace ServerWindow::trace_of(const at::Tensor& parameter) {
  constexpr size_t kSamples = 8;
  Trace trace{static_cast<int64_t>(parameter._version()), parameter.const_data_ptr(), 0};
  if (!parameter.is_non_overlapping_and_dense()) return trace;
  const auto* const bytes = static_cast<const std::byte*>(trace.memory);
  const size_t last = parameter.nbytes() < sizeof(uint64_t) ? 0 : parameter.nbytes() - sizeof(uint64_t);
  for (size_t i = 0; i < kSamples && parameter.nbytes() > 0; ++i) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + last * i / (kSamples - 1), std::min(sizeof(word), parameter.nbytes()));
    trace.sample = (trace.sample ^ word) * 0x9E3779B97F4A7C15U;  // as Fibonacci hashing
  }
  return trace;
}

std::vector<at::Tensor> ServerWindow::fetch(Part part, bool to_stay) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> values;
  std::vector<std::byte*> places;
  for (uint32_t c = 0; c < client_.chunks().size(); ++c) {
    const auto& chunk = client_.chunks()[c];
    values.push_back(at::empty({server::numel_of(chunk, part)}, server::dtype_of(chunk, part)));
    places.push_back(bytes_of(values.back()));
  }
  const auto exists = client_.read(part, is_synchronous() ? step_ : 0, places);
  std::vector<at::Tensor> whole(parameters_.size());
  for (uint32_t c = 0; c < client_.chunks().size(); ++c) {
    if (!exists[c]) continue;
    const auto& chunk = client_.chunks()[c];
    for (size_t i = 0; i < chunk.pieces.size(); ++i) {
      const auto p = static_cast<size_t>(chunk.pieces[i].parameter);
      const auto [offset, count] = server::place_of(chunk, i, part);
      const auto piece = values[c].narrow(0, offset, count);
      if (part == Part::steps) {
        whole[p] = piece[0].clone();
        continue;
      }
      if (!whole[p].defined()) {
        whole[p] = at::empty_strided(parameters_[p].sizes(), strides_[p], at::TensorOptions(values[c].scalar_type()));
      }
      elements_of(whole[p], chunk.pieces[i].run).copy_(piece);
    }
  }
  std::vector<at::Tensor> found(places_.size());
  for (size_t p = 0; p < places_.size(); ++p) {
    const auto [is_table, index] = places_[p];
    const bool leaves_out = is_table && to_stay && !tables_[index].was_here;
    if (!leaves_out) found[p] = is_table ? fetch_table(index, part) : whole[index];
  }
  return found;
}

// What an embedding of the window asks for.
class ServerWindow::Rows : public RowSource {
 public:
  Rows(ServerWindow& window, size_t table) : window_(window), table_(table) {}

  at::Tensor pull(const at::Tensor& rows) override {
    const auto numbers = rows.contiguous();
    auto values = at::empty({numbers.numel(), window_.plan_.tables[table_].dim}, at::kFloat);
    window_.client_.pull_rows(static_cast<uint32_t>(table_), window_.is_synchronous() ? window_.step_ : 0,
                              values_of<int64_t>(numbers), values_of<float>(values));
    return values;
  }

  at::Tensor whole() override { return window_.fetch_table(table_, Part::parameter); }

 private:
  ServerWindow& window_;
  size_t table_;
};

// Those that were written, or stepped, before.
void ServerWindow::give_rows(const ServerParameters& given) {
  constexpr int64_t kBlockElements = int64_t{1} << 20;
  for (size_t p = 0; p < places_.size(); ++p) {
    if (!places_[p].is_table) continue;
    const size_t t = places_[p].index;
    const auto table = static_cast<uint32_t>(t);
    const auto& spec = plan_.tables[t];
    const auto& weight = tables_[t].weight;
    const auto& steps = given.optimizer->step_count(given.position[p]);
    if (steps.defined()) client_.write_row_steps(table, static_cast<uint64_t>(steps.item<float>()));
    if (!tables_[t].was_here) continue;
    const int64_t block = std::max<int64_t>(kBlockElements / spec.dim, 1);
    for (int64_t begin = 0; begin < spec.num_rows; begin += block) {
      const int64_t count = std::min(block, spec.num_rows - begin);
      const auto values = weight.detach().narrow(0, begin, count).contiguous();
      const auto first = at::empty_like(values);
      spec.initialiser.fill_rows(first, begin);
      std::vector<at::Tensor> states;
      for (const auto part : {Part::state0, Part::state1, Part::state2}) {
        const auto state = part_of(weight, *given.optimizer, given.position[p], part);
        if (state.defined()) states.push_back(state.narrow(0, begin, count));
      }
      auto state = at::zeros({count, client_.state_width(table)}, at::kFloat);
      if (!states.empty()) state.copy_(at::cat(states, 1));
      const auto differs = values.ne(first).any(1).logical_or(state.ne(0).any(1));
      const auto rows = differs.nonzero().view({-1});
      if (rows.numel() == 0) continue;
      const auto numbers = at::add(rows, begin);
      const auto written = values.index_select(0, rows);
      state = state.index_select(0, rows);
      client_.write_rows(table, values_of<int64_t>(numbers), values_of<float>(written), values_of<float>(state));
    }
  }
}

void ServerWindow::leave_rows() {
  for (size_t t = 0; t < tables_.size(); ++t) {
    auto& table = tables_[t];
    if (table.was_here) table.weight.set_data(make_row_stub(plan_.tables[t].num_rows, plan_.tables[t].dim));
    table.version = table.weight._version();
    table.source = std::make_shared<Rows>(*this, t);
    set_row_source(table.weight, table.source);
  }
}

void ServerWindow::bring_rows_back() noexcept {
  for (size_t t = 0; t < tables_.size(); ++t) {
    if (!tables_[t].was_here) continue;
    try {
      tables_[t].weight.set_data(fetch_table(t, Part::parameter));
    } catch (const std::exception&) {
      return;
    }
  }
}

// Undefined where there is no such part.
at::Tensor ServerWindow::fetch_table(size_t t, Part part) {
  const at::NoGradGuard no_grad;
  if (part == Part::master) return {};
  const auto table = static_cast<uint32_t>(t);
  const auto& spec = plan_.tables[t];
  const int64_t which = static_cast<int64_t>(part) - static_cast<int64_t>(Part::state0);
  const bool is_state = part != Part::parameter && part != Part::steps;
  const int64_t width = is_state && spec.row_wise_adagrad ? 1 : spec.dim;
  if (is_state && (which + 1) * width > client_.state_width(table)) return {};
  auto touched = client_.fetch_rows(table, is_synchronous() ? step_ : 0);
  if (part == Part::steps) return at::scalar_tensor(static_cast<double>(touched.steps), at::kFloat);
  auto whole = at::zeros({spec.num_rows, width}, at::kFloat);
  if (part == Part::parameter) spec.initialiser.fill_rows(whole);
  const auto count = static_cast<int64_t>(touched.rows.size());
  if (count == 0) return whole;
  const auto rows = at::from_blob(touched.rows.data(), {count}, at::kLong);
  auto& values = part == Part::parameter ? touched.values : touched.states;
  const auto all = at::from_blob(values.data(), {count, static_cast<int64_t>(values.size()) / count}, at::kFloat);
  return whole.index_copy_(0, rows, part == Part::parameter ? all : all.narrow(1, which * width, width));
}

}  // namespace muster
