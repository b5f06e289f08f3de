#include "strategy/parameter_sets.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <string>
#include <utility>

#include "core/log.h"
#include "device/device.h"
#include "muster/error.h"

namespace muster {

namespace {

// Those that both sets have.
std::vector<int> shared_by(const std::vector<int>& some, const std::vector<int>& others) {
  std::vector<int> shared;
  std::set_intersection(some.begin(), some.end(), others.begin(), others.end(), std::back_inserter(shared));
  return shared;
}

// The handles of the group, where it is of this process's replicas alone and each has a device of its own; else none.
std::vector<comm::CommunicatorPtr> between_devices(const Session& session) {
  const auto& devices = session.topology().devices;
  const bool are_all = session.topology().num_replicas == static_cast<int>(devices.size());
  if (devices.size() == 1 || !are_all || share_memory(devices)) return {};
  return session.groups().gradients;
}

}  // namespace

int ParameterSets::set_of(std::vector<int> parameters, bool may_share) {
  const auto pass = session_.enter();
  std::sort(parameters.begin(), parameters.end());
  parameters.erase(std::unique(parameters.begin(), parameters.end()), parameters.end());
  for (size_t s = 0; s < sets_.size(); ++s) {
    const auto& others = sets_[s]->parameters();
    if (others == parameters) return static_cast<int>(s);
    const auto shared = shared_by(others, parameters);
    if (!shared.empty() && !may_share) {
      throw InvalidArgument(
          "parameter '" + session_.registry().name(static_cast<size_t>(shared.front())) +
          "' is in two different sets of optimizers, and this step names none; say with optimizers= in every step "
          "whose step it is");
    }
  }
  sets_.push_back(std::make_unique<ParameterSet>(session_.registry(), session_.topology(), session_.groups(),
                                                 session_.options(), &session_, std::move(parameters)));
  num_looked_at_ = 0;
  return static_cast<int>(sets_.size()) - 1;
}

void ParameterSets::change_set(int set, std::vector<int> parameters) {
  const auto pass = session_.enter();
  std::sort(parameters.begin(), parameters.end());
  at(set).set_parameters(std::move(parameters));
  num_looked_at_ = 0;
}

std::vector<int> ParameterSets::open() const {
  const auto pass = session_.enter();
  std::vector<int> open;
  for (size_t s = 0; s < sets_.size(); ++s) {
    if (sets_[s]->window_open()) open.push_back(static_cast<int>(s));
  }
  return open;
}

const std::vector<size_t>& ParameterSets::outsiders() {
  const size_t num_parameters = session_.registry().num_parameters();
  if (num_looked_at_ == num_parameters) return outsiders_;
  num_looked_at_ = num_parameters;
  outsiders_.clear();
  std::vector<bool> inside(num_parameters, false);
  for (const auto& set : sets_) {
    for (int p : set->parameters()) inside[static_cast<size_t>(p)] = true;
  }
  for (size_t p = 0; p < num_parameters; ++p) {
    if (!inside[p]) outsiders_.push_back(p);
  }
  return outsiders_;
}

std::vector<size_t> ParameterSets::outsiders_to_compare() {
  auto& registry = session_.registry();
  std::vector<size_t> due;
  for (const size_t p : outsiders()) {
    if (!registry.was_written(p)) continue;
    auto& pace = paces_[p];
    if (const auto times = registry.times_agreed(p); std::exchange(pace.times_agreed, times) != times) {
      pace.due = 2 * pace.found;
    }
    if (++pace.found >= pace.due) due.push_back(p);
  }
  return due;
}

ParameterSet& ParameterSets::begin_step(int set) {
  auto& begun = at(set);
  for (const auto& known : sets_) {
    if (known.get() == &begun) continue;
    const auto shared = shared_by(known->parameters(), begun.parameters());
    if (!shared.empty() && known->window_open() && !begun.window_open()) {
      throw InvalidArgument("parameter '" + session_.registry().name(static_cast<size_t>(shared.front())) +
                            "' is in another set of optimizers= too, whose window of several micro-batches is open; "
                            "close that first, with flush() say");
    }
    known->set_ignored(true, shared);
  }
  session_.registry().follow_moves(/*copies_all=*/!begun.window_open(), between_devices(session_));
  begun.set_ignored(false);
  return begun;
}

bool ParameterSets::awaits_servers(int set) const {
  const auto pass = session_.enter();
  auto& of_set = at(set);
  return of_set.server_window() != nullptr && of_set.servers() == nullptr;
}

void ParameterSets::connect_servers(int set, FlatOptimizer& optimizer, const std::vector<int>& parameters,
                                    const FlatGroups& groups) {
  session_.check_callable();
  if (has_servers()) {
    throw InvalidArgument(
        "parameter servers hold one set of parameters, and this step trains another; pass the same optimizers= in "
        "every step, or use another strategy");
  }
  at(set).connect_servers(optimizer, parameters, groups);
  session_.registry().drop_table_contents();
}

ParameterSet* ParameterSets::served() const noexcept {
  const auto found =
      std::find_if(sets_.begin(), sets_.end(), [](const auto& set) { return set->servers() != nullptr; });
  return found == sets_.end() ? nullptr : found->get();
}

ServerExchange& ParameterSets::servers() const {
  if (auto* const set = served()) return *set->servers();
  session_.check_open();
  throw InvalidArgument(
      "parameter servers deal batches once they know the model; prepare() the modules and the optimizer (AdamW, Adam, "
      "SGD or Adagrad) before a loader is iterated");
}

void ParameterSets::refresh() {
  auto* const set = served();
  if (set != nullptr && !set->window_open()) set->servers()->refresh();
}

std::vector<std::vector<at::Tensor>> ParameterSets::state_on_servers(const std::vector<int>& parameters,
                                                                     std::span<const server::Part> parts,
                                                                     bool to_stay) const {
  std::vector<std::vector<at::Tensor>> values(parts.size());
  auto* const set = served();
  if (set == nullptr) return values;
  const auto& trained = set->trainable();
  const auto whole = set->servers()->fetch(parts, to_stay);
  for (const int index : parameters) {
    const auto found = std::find(trained.begin(), trained.end(), index);
    for (size_t i = 0; i < parts.size(); ++i) {
      values[i].push_back(found == trained.end() ? at::Tensor()
                                                 : whole[i][static_cast<size_t>(found - trained.begin())]);
    }
  }
  return values;
}

at::Tensor ParameterSets::stand_in(int parameter) const {
  auto* const set = served();
  if (set == nullptr) return {};
  const auto& trained = set->trainable();
  const auto found = std::find(trained.begin(), trained.end(), parameter);
  return found == trained.end() ? at::Tensor() : set->servers()->stand_in(static_cast<size_t>(found - trained.begin()));
}

TableContents ParameterSets::table_contents(int parameter) const {
  if (auto* const set = served()) {
    const auto& trained = set->trainable();
    const auto found = std::find(trained.begin(), trained.end(), parameter);
    if (found != trained.end()) return set->servers()->contents(static_cast<size_t>(found - trained.begin()));
  }
  const auto& registry = session_.registry();
  const auto* const rows = registry.rows_of(static_cast<size_t>(parameter));
  if (rows->contents) return *rows->contents;
  const int64_t dim = registry.parameter(0, static_cast<size_t>(parameter)).size(1);
  return {at::empty({0}, at::kLong), at::empty({0, dim}, at::kFloat), at::empty({0, 0}, at::kFloat)};
}

void ParameterSets::leave_memory() noexcept {
  try {
    for (const auto& set : sets_) set->leave_memory();
  } catch (const std::exception& error) {
    log(LogLevel::warning, std::string("parameters stay in memory that the host's other workers see: ") + error.what());
  }
}

void ParameterSets::end() {
  if (auto* const set = served()) set->servers()->bring_back();
  leave_memory();
  sets_.clear();
}

}  // namespace muster
