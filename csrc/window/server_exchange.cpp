#include "window/server_exchange.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <exception>
#include <random>
#include <span>
#include <utility>
#include <variant>

#include "core/control_group.h"
#include "core/flat_layout.h"
#include "core/log.h"
#include "core/ownership.h"
#include "muster/error.h"

namespace muster {

namespace {

using server::Part;

constexpr kernels::StepScalars kChangesNothing{
    .divisor = 1, .clip = 1, .norm = 0, .unit = 1, .finite = 1, .dropped = 1};
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
  plan.heartbeat_ms = static_cast<uint32_t>(job.options.heartbeat * 1000);
  plan.norm_type = options.clip_norm_type;
  return plan;
}

uint64_t log_bytes_of(const ServerOptions& options, const server::Plan& plan) {
  constexpr uint64_t kLeast = uint64_t{256} << 20;
  constexpr uint64_t kLeastOfTables = uint64_t{1} << 30;  // what a step pushes of rows nobody knows before
  constexpr uint64_t kSteps = 8;
  if (options.log_bytes) return static_cast<uint64_t>(*options.log_bytes);
  const uint64_t least = plan.tables.empty() ? kLeast : kLeastOfTables;
  uint64_t step = 0;
  for (const auto& chunk : server::cut_chunks(plan)) step += static_cast<uint64_t>(chunk.gradient_bytes());
  return std::min(std::max(least, kSteps * step), std::max(kLeast, static_cast<uint64_t>(memory_limit()) / 8));
}

server::ClientConfig client_of(const ServerJob& job, int rank, const server::Plan& plan) {
  server::ClientConfig config;
  config.servers = job.channels;
  config.rank = static_cast<uint32_t>(rank);
  config.plan = plan;
  config.job = job.id;
  config.token = job.token;
  config.takes_over = job.options.takeover;
  config.joins = job.joins;
  config.begins_anew = job.is_loaded;
  config.patience = std::chrono::milliseconds(static_cast<int64_t>(job.options.patience * 1000));
  config.log_bytes = log_bytes_of(job.options, plan);
  auto facts = job.facts;
  facts.row_seeds.clear();
  for (const auto& table : plan.tables) facts.row_seeds.emplace_back(table.name, table.initialiser.seed);
  config.facts = server::encode(facts);
  return config;
}

}  // namespace

ServerExchange::ServerExchange(const ServerJob& job, int rank, int workers, const StrategyOptions& options,
                               const ServerParameters& given)
    : plan_(plan_of(job, workers, options, given)),
      rank_(static_cast<uint32_t>(rank)),
      joins_(job.joins),
      groups_(given.groups),
      client_(client_of(job, rank, plan_)),
      values_(client_),
      rows_(client_, in_step_, plan_),
      chunks_of_(plan_.parameters.size()),
      sums_(plan_.parameters.size()) {
  for (size_t p = 0; p < given.tensors.size(); ++p) {
    const bool is_table = given.rows[p] != nullptr;
    places_.push_back({is_table, is_table ? rows_.size() : values_.size()});
    if (is_table) {
      rows_.add(given.tensors[p], given.position[p], given.rows[p]->contents);
    } else {
      const bool has_state = std::holds_alternative<std::vector<kernels::AdagradGroup>>(plan_.groups) &&
                             given.optimizer->state().entry(given.position[p]).started;
      if (has_state) saving_.begun.push_back(static_cast<uint32_t>(values_.size()));
      values_.add(given.tensors[p], given.position[p]);
    }
  }
  values_.land();
  for (uint32_t c = 0; c < client_.chunks().size(); ++c) {
    for (const auto& piece : client_.chunks()[c].pieces) chunks_of_[static_cast<size_t>(piece.parameter)].push_back(c);
  }
  missing_.resize(client_.chunks().size());
  for (int r = 0; r < workers; ++r) decision_.next_members.push_back(static_cast<uint32_t>(r));
  try {
    connect(given, job, rank == server::kChief);
  } catch (...) {
    client_.give_up();
    throw;
  }
}

ServerExchange::~ServerExchange() {
  try {
    client_.leave();
  } catch (const std::exception& error) {  // servers know by the silence
    log(LogLevel::warning, std::string("this worker left the parameter servers, and its last steps may be in no "
                                       "snapshot: ") +
                               error.what());
  }
}

void ServerExchange::connect(const ServerParameters& given, const ServerJob& job, bool is_chief) {
  const at::NoGradGuard no_grad;
  if (is_chief && !client_.is_started()) {
    const auto write = [&] {
      for (const auto part : {Part::parameter, Part::state0, Part::state1, Part::state2, Part::master, Part::steps}) {
        values_.give(*given.optimizer, part);
      }
      rows_.give(*given.optimizer);
    };
    client_.start(write, job.passes);
  } else if (is_chief && job.is_loaded) {
    throw CheckpointError(
        "load() read a checkpoint on the chief, and another worker that has loaded none began the job with what the "
        "parameter servers hold; call load() on all workers");
  }
  step_ = client_.join();
  since_ = step_;
  rows_.read_after(newest());
  // A step that was decided may not be made yet.
  values_.read(joins_ ? newest() : 0);
  values_.adopt();
  rows_.leave();
}

void ServerExchange::open() {
  if (window_.is_open)
    throw CommError("a window was cut short by an error, so that servers hold half of it; start the job again");
  const auto refuse = [](const std::string& name, const std::string& where) {
    throw InvalidArgument(
        "parameter '" + name + "' was written " + where +
        ", where the parameter servers, which hold it, do not see it; copy back the values that it had "
        "after the last step, and change parameters before the first step, or under another strategy");
  };
  const auto check = [&](const std::string& name, bool is_other) {
    if (is_other) refuse(name, "outside step()");
  };
  if (const auto p = values_.take_overwritten()) {
    refuse(plan_.parameters[*p].name, "in the last step or since (by forward or a hook, say)");
  }
  for (size_t p = 0; p < values_.size(); ++p) check(plan_.parameters[p].name, values_.has_other_values(p));
  for (size_t t = 0; t < rows_.size(); ++t) check(plan_.tables[t].name, rows_.was_written(t));
  for (size_t c = 0; c < missing_.size(); ++c) missing_[c] = client_.chunks()[c].pieces.size();
}

void ServerExchange::take(size_t parameter, const at::Tensor& sums) {
  const std::lock_guard lock(in_step_);
  window_.is_open = true;
  const size_t p = places_[parameter].index;
  sums_[p] = sums;
  noting_failure([&] {
    for (const uint32_t chunk : chunks_of_[p]) {
      if (--missing_[chunk] == 0) push(chunk);
    }
  });
}

void ServerExchange::take_rows(size_t parameter, const at::Tensor& sums) {
  window_.is_open = true;
  noting_failure([&] { rows_.push(step_ + 1, places_[parameter].index, sums); });
}

// The window's end would find that something is missing, and not why.
void ServerExchange::noting_failure(const std::function<void()>& push) {
  try {
    push();
  } catch (...) {
    if (!window_.failure) window_.failure = std::current_exception();
    throw;
  }
}

void ServerExchange::push(uint32_t c) {
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
    pieces.emplace_back(static_cast<const std::byte*>(run.const_data_ptr()), run.nbytes());
    owner->push_back(run);
    end += run.nbytes();
  }
  fill_up_to(static_cast<size_t>(chunk.gradient_bytes()));
  client_.push(step_ + 1, c, pieces, owner);
}

std::vector<std::pair<uint32_t, std::string>> ServerExchange::agree(const at::Tensor& tail, std::string record) {
  const std::span<const double> mine(tail.const_data_ptr<double>(), static_cast<size_t>(tail.numel()));
  client_.flush();
  decision_ = client_.commit(step_ + 1, {mine.begin(), mine.end()}, std::move(record));
  givers_ = decision_.members;
  has_lost_ = has_lost_ || decision_.next_members.size() < plan_.workers;
  std::copy(decision_.numbers.begin(), decision_.numbers.end(), tail.mutable_data_ptr<double>());
  std::vector<std::pair<uint32_t, std::string>> records;
  for (size_t m = 0; m < decision_.members.size(); ++m) {
    records.emplace_back(decision_.members[m], decision_.record(m));
  }
  return records;
}

server::Apply ServerExchange::command(const kernels::StepScalars& scalars) const {
  server::Apply apply;
  apply.step = step_ + 1;
  apply.members = plan_.is_synchronous() ? decision_.members : std::vector<uint32_t>{rank_};
  apply.scalars = scalars;
  apply.groups = groups_;
  apply.batches = batches_;
  return apply;
}

void ServerExchange::step(const kernels::StepScalars& scalars, const FlatGroups& groups,
                          const std::vector<size_t>& unused) {
  try {
    plan_.check_groups(groups);
  } catch (const InvalidArgument&) {
    skip();  // else servers would hold half of the window
    throw;
  }
  groups_ = groups;
  auto apply = command(scalars);
  for (const size_t parameter : unused) {
    const auto [is_table, index] = places_[parameter];
    (is_table ? apply.unused_tables : apply.unused).push_back(static_cast<uint32_t>(index));
  }
  finish(apply, /*changes=*/true);
}

void ServerExchange::skip() { finish(command(kChangesNothing), /*changes=*/false); }

void ServerExchange::note_batches(const std::vector<server::BatchId>& batches) {
  batches_.insert(batches_.end(), batches.begin(), batches.end());
}

server::Dealt ServerExchange::deal(uint32_t loader, uint64_t epoch, uint64_t batches, std::vector<uint64_t> finished) {
  const auto& begun = client_.passes_at_join();
  const bool is_left = joins_ && std::any_of(begun.begin(), begun.end(), [&](const server::PassId& pass) {
                         return pass.loader == loader && pass.epoch > epoch;
                       });
  if (is_left) return {server::Dealt::State::ended, 0};
  return client_.deal(loader, epoch, batches, std::move(finished));
}

void ServerExchange::end_pass(uint32_t loader, uint64_t epoch, uint64_t batches, std::vector<uint64_t> finished) {
  client_.end_pass(loader, epoch, batches, std::move(finished));
}

void ServerExchange::refresh() {
  if (plan_.is_synchronous()) return;
  values_.note_overwritten();
  values_.read(0);
  values_.adopt();
}

void ServerExchange::bring_back() noexcept {
  if (client_.has_lost_one()) return;
  rows_.bring_back();
  if (plan_.is_synchronous() || window_.is_open || client_.has_lost_one()) return;
  try {
    if (values_.hold_what_landed()) refresh();
  } catch (const std::exception&) {
    return;
  }
}

void ServerExchange::finish(const server::Apply& apply, bool changes) {
  if (window_.failure) std::rethrow_exception(window_.failure);
  if (!plan_.is_synchronous()) {
    client_.flush();
    client_.apply(apply);
    client_.commit(apply.step, {});
  } else if (changes) {
    values_.note_overwritten();
    client_.apply_and_read(apply, values_.landing());
  } else {
    client_.apply(apply);
  }
  step_ = apply.step;
  rows_.read_after(newest());
  window_.is_open = false;
  batches_.clear();
  if (plan_.is_synchronous() && changes) values_.adopt();
  refresh();
}

std::shared_ptr<const ServerCut> ServerExchange::begin_cut(const std::filesystem::path& draft) {
  if (saving_.refused.contains(draft.parent_path())) return nullptr;
  server::WritePart request{newest(), std::random_device()(), draft.string()};
  for (uint32_t p = 0; p < values_.size(); ++p) {
    const bool is_empty = c10::multiply_integers(plan_.parameters[p].sizes) == 0;
    if (!values_.is_row_major(p) || is_empty || values_.was_written(p)) request.left.push_back(p);
  }
  request.begun = saving_.begun;
  for (uint32_t t = 0; t < rows_.size(); ++t) {
    if (!rows_.was_here(t) && !rows_.was_written(t)) request.tables.push_back(t);
  }
  auto cut = std::make_shared<const ServerCut>(plan_, request, client_.write_parts(request));
  if (cut->refusal().empty()) return saving_.cut = std::move(cut);
  saving_.refused.insert(draft.parent_path());
  log(LogLevel::warning, cut->refusal() +
                             "; so the chief alone writes checkpoints there, and fetches for that what servers hold: "
                             "for these to write it, let them run as its user and see its folder at the same path");
  return nullptr;
}

at::Tensor ServerExchange::stand_in(size_t parameter) const {
  const auto [is_table, index] = places_[parameter];
  return saving_.cut == nullptr || is_table ? at::Tensor() : saving_.cut->part(index, Part::parameter);
}

TableContents ServerExchange::contents(size_t parameter) {
  const at::NoGradGuard no_grad;
  const size_t table = places_[parameter].index;
  if (saving_.cut && saving_.cut->has_table(table)) return saving_.cut->contents(table);
  return rows_.contents(places_[parameter].index);
}

std::vector<std::vector<at::Tensor>> ServerExchange::fetch(std::span<const Part> parts, bool to_stay) {
  const at::NoGradGuard no_grad;
  std::vector<std::vector<at::Tensor>> whole;
  std::vector<bool> wanted;
  for (size_t p = 0; saving_.cut && p < values_.size(); ++p) wanted.push_back(saving_.cut->is_left(p));
  for (const auto part : parts) {
    auto& of_part = whole.emplace_back(values_.fetch(part, newest(), wanted));
    for (size_t p = 0; p < wanted.size(); ++p) {
      if (!wanted[p]) of_part[p] = saving_.cut->part(p, part);
    }
  }
  std::vector<std::vector<at::Tensor>> found(parts.size(), std::vector<at::Tensor>(places_.size()));
  for (size_t p = 0; p < places_.size(); ++p) {
    const auto [is_table, index] = places_[p];
    if (is_table && to_stay && !rows_.was_here(index)) continue;
    const auto of_table = is_table ? rows_.fetch(index, parts) : std::vector<at::Tensor>();
    for (size_t i = 0; i < parts.size(); ++i) found[i][p] = is_table ? of_table[i] : whole[i][index];
  }
  return found;
}

}  // namespace muster
