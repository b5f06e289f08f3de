#include "strategy/saving.h"

#include <ATen/Context.h>
#include <muster/version.h>

#include <algorithm>
#include <chrono>
#include <iomanip>
#include <random>
#include <utility>

#include "checkpoint/joint_snapshot.h"
#include "checkpoint/saved_tree.h"
#include "checkpoint/snapshot_names.h"
#include "core/plain_text.h"
#include "job/job_agreement.h"
#include "muster/error.h"
#include "strategy/collectives.h"
#include "strategy/divided_tensors.h"
#include "strategy/saved_modules.h"
#include "strategy/saved_parts.h"
#include "strategy/saved_passes.h"
#include "strategy/strategy_state.h"
#include "strategy/telling.h"
#include "window/loss_scale.h"

namespace muster {

namespace {

namespace fs = std::filesystem;
using List = SavedValue::List;
using Dict = SavedValue::Dict;

List positions_of(const OptimizerSets& sets, int set) {
  List positions;
  for (const int position : sets.optimizers_of(set)) positions.emplace_back(position);
  return positions;
}

}  // namespace

bool Saving::has_servers() const {
  const auto& groups = strategy_.core->session().groups();
  return groups.shares_batches() || groups.deals_batches();
}

bool Saving::is_chief() const { return strategy_.core->session().topology().rank == 0; }

bool Saving::told_by_chief(const char* what, const std::function<bool()>& act) {
  check_callable(what);
  bool mine = false;
  together(what, has_servers(), [&] { mine = act(); });
  if (has_servers()) return mine && is_chief();
  return number_of_chief(mine ? 1 : 0) == 1;
}

int64_t Saving::number_of_chief(int64_t number) {
  if (strategy_.core->session().topology().num_workers == 1) return number;
  return broadcast_number(strategy_.workers("save()").group, number);
}

bool Saving::saves_alone() const { return has_servers() || strategy_.core->session().topology().num_workers == 1; }

bool Saving::has_open_window() const { return !strategy_.core->sets().open().empty(); }

void Saving::finish() {
  if (writer_) writer_->wait();
}

void Saving::end() {
  if (!writer_) return;
  const auto writer = std::exchange(writer_, nullptr);
  writer->wait();
}

void Saving::check_callable(const char* what) const {
  strategy_.core->session().check_callable();
  if (!has_open_window()) return;
  throw InvalidArgument(
      std::string("a window is open, whose gradients a checkpoint does not hold; call flush() before ") + what +
      "(), or call it after a step whose result has `stepped`");
}

void Saving::together(const char* what, bool is_alone, const std::function<void()>& act) {
  told_by_all(what, is_alone, [&] {
    act();
    return std::string();
  });
}

std::vector<std::string> Saving::told_by_all(const char* what, bool is_alone, const std::function<std::string()>& act) {
  if (is_alone || strategy_.core->session().topology().num_workers == 1) return {act()};
  return muster::told_by_all(strategy_.workers(what).group, what, act);
}

void Saving::save(const fs::path& folder, const SavedState& state, const SaveOptions& options) {
  check_callable("save");
  if (folder.empty()) throw InvalidArgument("save() was given an empty path; name a folder");
  if (checkpoint::number_of(folder)) {
    throw InvalidArgument("'" + folder.string() + "' is called as one checkpoint; give save() '" +
                          folder.parent_path().string() + "'");
  }
  if (options.keep && *options.keep < 1) {
    throw InvalidArgument("keep=" + std::to_string(*options.keep) + ": it must be at least 1, or empty to keep all");
  }
  if (has_servers() && !is_chief()) return;
  if (saves_alone()) {
    save_alone(folder, state, options);
  } else {
    save_with_others(folder, state, options);
  }
}

void Saving::save_with_others(const fs::path& folder, const SavedState& state, const SaveOptions& options) {
  const auto& topology = strategy_.core->session().topology();
  std::optional<checkpoint::JointSnapshot> joint;
  const auto announced = told_by_all("save", false, [&] {
    joint.emplace(writer_to(folder, options), topology.rank, strategy_.core->session().groups().store);
    return joint->announce(lineage());
  });
  const auto states = generators();
  std::string document;
  const auto looked = told_by_all("save", false, [&] {
    DividedTensors divided;
    auto tree = checkpoint::encode_tree_in_place(
        content(is_chief() ? state : SavedState(), strategy_.loaders.saved(), states, &divided));
    document = std::move(tree.document);
    return joint->look(announced, joint_content(tree.tensors, divided, names_of_alike(tree.tensors)));
  });
  bool is_joint = false;
  together("save", false, [&] { is_joint = joint->copy(looked); });
  if (is_joint) {
    const auto seconds = std::chrono::duration<double>(strategy_.core->session().options().timeout);
    joint->start(metadata(std::move(document)), std::chrono::duration_cast<std::chrono::milliseconds>(seconds));
    return;
  }
  together("save", false, [&] {
    if (!is_chief() && !strategy_.core->session().options().shard_optimizer) return;
    const auto whole = content(state, strategy_.loaders.saved(), states, nullptr);
    if (!is_chief()) return;
    auto tree = checkpoint::encode_tree(whole);
    writer_->write_copy({std::move(tree.tensors), metadata(std::move(tree.document))});
  });
}

// Parameters, and what is kept of them by optimizers that do the same on all workers.
std::set<std::string> Saving::names_of_alike(const checkpoint::NamedTensors& tensors) const {
  std::set<std::string> names;
  for (size_t i = 0; i < strategy_.modules.size(); ++i) {
    const auto prefix = "modules/" + std::to_string(i) + '/';
    for (const auto& name : detail::parameter_names(*strategy_.modules[i].replicas().front())) {
      names.insert(prefix + name);
    }
  }
  for (size_t i = 0; i < strategy_.optimizers.size(); ++i) {
    const auto prefix = "optimizers/" + std::to_string(i) + "/state/";
    for (const auto& [name, tensor] : tensors) {
      if (name.starts_with(prefix)) names.insert(name);
    }
  }
  return names;
}

// Of each worker, a row; of the chief alone where it saves alone.
at::Tensor Saving::generators() {
  auto generator = at::globalContext().defaultGenerator(c10::Device(c10::kCPU));
  at::Tensor state;
  {
    const std::lock_guard lock(generator.mutex());
    state = generator.get_state().unsqueeze(0);
  }
  if (saves_alone()) return state;
  return gather_over_workers(strategy_.workers("save()").group, {{{state}, 1}}).front();
}

Dict Saving::content(const SavedState& state, const List& places, const at::Tensor& generators,
                     DividedTensors* divided) {
  auto& core = *strategy_.core;
  List modules;
  for (const auto& module : strategy_.modules) {
    modules.emplace_back(detail::state_of_module(*module.replicas().front()));
  }
  List optimizers;
  other_options_.resize(strategy_.optimizers.size());
  for (size_t i = 0; i < strategy_.optimizers.size(); ++i) {
    auto& optimizer = strategy_.optimizer(i);
    const auto names = detail::parameter_names(optimizer, core.session().registry());
    optimizers.emplace_back(
        detail::save_optimizer(optimizer, names, other_options_[i], core.session().workers("save()"), divided));
  }
  auto tables = tables_.state();
  Dict named;
  for (const auto& [name, value] : state) named.emplace(name, Dict{{"value", value}});
  Dict content{{"strategy", Dict{{"steps", core.stepper().steps()},
                                 {"calls", core.session().streams().calls()},
                                 {"seed", std::to_string(core.session().streams().seed())},
                                 {"workers", core.session().topology().num_workers},
                                 {"replicas", core.session().topology().num_replicas}}},
               {"modules", std::move(modules)},
               {"optimizers", std::move(optimizers)},
               {"loss_scales", loss_scales()},
               {"units", units()},
               {"loaders", places},
               {"generators", generators},
               {"state", std::move(named)}};
  if (!tables.empty()) content["tables"] = std::move(tables);
  if (random_) content["random"] = *random_;
  return content;
}

List Saving::loss_scales() const {
  const auto rule = loss_scale_rule(strategy_.core->session().options());
  List scales;
  if (!rule) return scales;
  for (const int set : strategy_.sets.numbers()) {
    const auto state = strategy_.core->sets().at(set).window().loss_scale().get();
    scales.emplace_back(Dict{{"optimizers", positions_of(strategy_.sets, set)},
                             {"scale", Dict{{"scale", state.scale},
                                            {"growth_factor", rule->growth},
                                            {"backoff_factor", rule->backoff},
                                            {"growth_interval", rule->interval},
                                            {"_growth_tracker", state.growth_tracker}}}});
  }
  return scales;
}

List Saving::units() const {
  List units;
  for (const int set : strategy_.sets.numbers()) {
    const auto unit = strategy_.core->sets().at(set).window().loss_scale().unit();
    if (unit) units.emplace_back(Dict{{"optimizers", positions_of(strategy_.sets, set)}, {"unit", *unit}});
  }
  return units;
}

checkpoint::SnapshotWriter& Saving::writer_to(const fs::path& folder, const SaveOptions& options) {
  if (writer_) writer_->wait();
  const auto made_with = std::pair(fs::absolute(folder), options.keep);
  if (!writer_ || made_with_ != made_with) {
    writer_ = nullptr;  // which lets the folder go
    writer_ = std::make_unique<checkpoint::SnapshotWriter>(made_with.first,
                                                           checkpoint::SnapshotOptions{.keep = options.keep});
    made_with_ = made_with;
  }
  return *writer_;
}

const std::string& Saving::lineage() {
  if (!lineage_.empty()) return lineage_;
  std::random_device random;
  TextWriter text;
  for (int i = 0; i < 2; ++i) text << std::hex << std::setw(8) << std::setfill('0') << random();
  return lineage_ = text.str();
}

checkpoint::Metadata Saving::metadata(std::string document) {
  return {{"muster.format", detail::kFormat},           {"muster.lineage", lineage()},
          {"muster.version", std::string(version())},   {"torch.version", std::string(built_with_torch())},
          {"steps", strategy_.core->stepper().steps()}, {"content", std::move(document)}};
}

}  // namespace muster
