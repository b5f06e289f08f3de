#include "strategy/saving.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <charconv>
#include <exception>
#include <map>
#include <utility>

#include "checkpoint/saved_tree.h"
#include "checkpoint/snapshot.h"
#include "comm/text_exchange.h"
#include "core/log.h"
#include "job/job_agreement.h"
#include "muster/error.h"
#include "muster/sharded_embedding.h"
#include "strategy/collectives.h"
#include "strategy/saved_parts.h"
#include "strategy/strategy_state.h"

namespace muster {

namespace {

namespace fs = std::filesystem;
using detail::compare_names;
using detail::integer;
using detail::kFormat;
using detail::list_of;
using detail::member;
using detail::part_of;
using List = SavedValue::List;
using Dict = SavedValue::Dict;

std::string weight_of(const std::string& embedding) { return embedding.empty() ? "weight" : embedding + ".weight"; }

// What state_dict() has in Python: parameters and buffers by name, without weights that servers alone hold. Rows that
// servers hold are not fetched.
std::map<std::string, at::Tensor> tensors_of(const torch::nn::Module& module) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& parameter : module.named_parameters()) tensors[parameter.key()] = parameter.value();
  for (const auto& buffer : module.named_buffers()) {
    if (buffer.value().defined()) tensors[buffer.key()] = buffer.value();
  }
  for (const auto& submodule : module.named_modules()) {
    if (is_on_servers(*submodule.value())) tensors.erase(weight_of(submodule.key()));
  }
  return tensors;
}

std::vector<std::string> names_of(const auto& values) {
  std::vector<std::string> names;
  for (const auto& [name, value] : values) names.push_back(name);
  return names;
}

Dict state_of(const torch::nn::Module& module) {
  auto tensors = tensors_of(module);
  for (const auto& submodule : module.named_modules()) {
    const auto* const embedding = submodule.value()->as<ShardedEmbeddingImpl>();
    if (embedding == nullptr || embedding->options().on_servers) continue;
    tensors[weight_of(submodule.key())] = embedding->whole_weight();
  }
  return {tensors.begin(), tensors.end()};
}

void check_module(const torch::nn::Module& module, const Dict& saved, const std::string& what) {
  const auto ours = tensors_of(module);
  compare_names(names_of(ours), names_of(saved), what);
  for (const auto& [name, tensor] : ours) {
    const auto& theirs = saved.at(name).get<at::Tensor>();
    if (tensor.sizes() == theirs.sizes()) continue;
    throw LayoutMismatch("'" + name + "' of " + what + " has shape " + c10::str(tensor.sizes()) +
                         ", and in the checkpoint " + c10::str(theirs.sizes()) + "; build the model that was saved");
  }
}

void take_module(const torch::nn::Module& module, const Dict& saved) {
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : tensors_of(module)) at::Tensor(tensor).copy_(saved.at(name).get<at::Tensor>());
}

uint64_t seed_of(const std::string& text) {
  uint64_t seed = 0;
  const char* const end = text.data() + text.size();
  if (const auto [stop, error] = std::from_chars(text.data(), end, seed); error == std::errc() && stop == end)
    return seed;
  throw CheckpointError("a checkpoint has the seed '" + text + "', which is none; load another one");
}

// Of a snapshot's metadata.
template <class T>
const T* found_in(const checkpoint::Metadata& metadata, const std::string& key) {
  const auto found = metadata.find(key);
  return found == metadata.end() ? nullptr : std::get_if<T>(&found->second);
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
  return broadcast_number(strategy_.workers(), number);
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
  std::string error;
  std::exception_ptr raised;
  try {
    act();
  } catch (const std::exception& problem) {
    error = problem.what();
    raised = std::current_exception();
  }
  std::vector<std::string> told;
  if (!is_alone && strategy_.core->session().topology().num_workers > 1) {
    try {
      told = exchange_texts(strategy_.workers(), error);
    } catch (const Error&) {
      if (!raised) throw;  // else it says less
    }
  }
  if (raised) std::rethrow_exception(raised);
  for (size_t rank = 0; rank < told.size(); ++rank) {
    if (told[rank].empty()) continue;
    throw CheckpointError(std::string(what) + "() failed on rank " + std::to_string(rank) + ": " + told[rank]);
  }
}

// --- writing -------------------------------------------------------------------------------------------------------

void Saving::save(const fs::path& folder, const SavedState& state, const SaveOptions& options) {
  check_callable("save");
  if (options.keep && *options.keep < 1) {
    throw InvalidArgument("keep=" + std::to_string(*options.keep) + ": it must be at least 1, or empty to keep all");
  }
  const bool is_alone = has_servers();
  if (is_alone && !is_chief()) return;
  const bool is_divided = strategy_.core->session().options().shard_optimizer;
  const auto states = generators();
  together("save", is_alone, [&] {
    if (!is_chief() && !is_divided) return;
    const auto cut = begin_cut(folder, options);
    auto whole = content(state);
    whole["generators"] = states;
    if (is_chief()) write(folder, std::move(whole), options, cut.get());
  });
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
  return gather_over_workers(strategy_.workers(), {{{state}, 1}}).front();
}

Dict Saving::content(const SavedState& state) {
  auto& core = *strategy_.core;
  List modules;
  for (const auto& module : strategy_.modules) modules.emplace_back(state_of(*module.replicas().front()));
  List optimizers;
  other_options_.resize(strategy_.optimizers.size());
  for (size_t i = 0; i < strategy_.optimizers.size(); ++i) {
    auto& optimizer = *strategy_.optimizers[i];
    const auto names = detail::parameter_names(optimizer, core.session().registry());
    optimizers.emplace_back(detail::save_optimizer(optimizer, names, other_options_[i], core.session().workers()));
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
               {"loaders", loaders()},
               {"state", std::move(named)}};
  if (!tables.empty()) content["tables"] = std::move(tables);
  return content;
}

List Saving::loss_scales() const {
  const auto& options = strategy_.core->session().options().loss_scale;
  List scales;
  if (!options) return scales;
  for (const int set : strategy_.sets.numbers()) {
    List optimizers;
    for (const int position : strategy_.sets.optimizers_of(set)) optimizers.emplace_back(position);
    const auto state = strategy_.core->sets().at(set).window().loss_scale().get();
    scales.emplace_back(Dict{{"optimizers", std::move(optimizers)},
                             {"scale", Dict{{"scale", state.scale},
                                            {"growth_factor", options->growth},
                                            {"backoff_factor", options->backoff},
                                            {"growth_interval", options->interval},
                                            {"_growth_tracker", state.growth_tracker}}}});
  }
  return scales;
}

// Batches that parameter servers deal have no place in one worker: their epoch begins anew.
List Saving::loaders() const {
  List saved;
  for (const auto& place : strategy_.loaders.places()) {
    const auto state = place->is_known ? state_of(*place) : LoaderState{.epoch = place->epoch};
    saved.emplace_back(Dict{{"epoch", state.epoch}, {"batches", state.batches}, {"generators", List()}});
  }
  return saved;
}

// --- reading -------------------------------------------------------------------------------------------------------

std::optional<SavedState> Saving::load(const fs::path& folder) {
  check_callable("load");
  if (strategy_.core->sets().has_servers()) {
    throw InvalidArgument(
        "parameter servers hold values and state from the first step on; load() before it, in a new job");
  }
  const bool joins = strategy_.core->session().groups().joins();
  std::optional<Found> found;
  together("load", joins, [&] {
    if (joins || is_chief()) found = read(folder);
  });
  if (!joins) found = broadcast(std::move(found));
  if (!found) return std::nullopt;
  const auto place = (folder / found->name).string();
  try {
    auto saved = checkpoint::decode_tree(found->tree, place).get<Dict>();
    if (!joins) {  // else it has them from the servers, later ones
      tables_.place(saved);
      check(saved);
      take(saved);
    }
    SavedState state;
    const auto* const named = part_of(saved, "state");
    for (const auto& [name, value] : named == nullptr ? Dict() : named->get<Dict>()) {
      const auto& held = value.get<Dict>();
      if (held.size() == 1) state.emplace(name, held.begin()->second);  // of an object of Python's, its state_dict
    }
    return state;
  } catch (const LayoutMismatch& problem) {
    throw LayoutMismatch("'" + place + "': " + problem.what());
  } catch (const InvalidArgument& problem) {
    throw CheckpointError("'" + place + "' is no checkpoint of a strategy (" + problem.what() + "); load another one");
  }
}

std::optional<Saving::Found> Saving::read(const fs::path& folder) {
  if (writer_) writer_->wait();
  auto snapshot = checkpoint::read_newest_snapshot(folder);
  if (!snapshot) return std::nullopt;
  const auto* const format = found_in<int64_t>(snapshot->metadata, "muster.format");
  const auto* const document = found_in<std::string>(snapshot->metadata, "content");
  if (format == nullptr || document == nullptr) {
    throw CheckpointError("what is in '" + folder.string() +
                          "' are no checkpoints of a strategy; give the folder that save() wrote");
  }
  if (*format != kFormat) {
    const auto* const by = found_in<std::string>(snapshot->metadata, "muster.version");
    throw CheckpointError("the checkpoints in '" + folder.string() + "' are of format " + std::to_string(*format) +
                          ", and this Muster reads " + std::to_string(kFormat) +
                          "; load them with the version that wrote them (" + (by != nullptr ? *by : "unknown") + ")");
  }
  return Found{{*document, std::move(snapshot->tensors)}, snapshot->folder.filename().string()};
}

// Collective, but where there is one worker: the chief's.
std::optional<Saving::Found> Saving::broadcast(std::optional<Found> found) {
  if (strategy_.core->session().topology().num_workers == 1) return found;
  auto& workers = strategy_.workers();
  std::string text;
  Leaves tensors;
  List names;
  if (found) {
    for (const auto& [name, tensor] : tables_.for_others(found->tree).tensors) {
      names.emplace_back(name);
      tensors.push_back(tensor);
    }
    text = checkpoint::encode_tree(List{found->tree.document, names, found->name}).document;
  }
  text = exchange_texts(workers, text).front();
  if (text.empty()) return std::nullopt;
  const auto told = checkpoint::decode_tree({text, {}}, "what rank 0 sent").get<List>();
  tensors = broadcast_over_workers(workers, tensors, 0);
  if (found) return found;
  Found sent{{told.at(0).get<std::string>(), {}}, told.at(2).get<std::string>()};
  const auto& all = told.at(1).get<List>();
  for (size_t i = 0; i < all.size(); ++i) sent.tree.tensors.emplace(all[i].get<std::string>(), tensors.at(i));
  return sent;
}

// Throws LayoutMismatch before anything is loaded where the checkpoint is of other objects.
void Saving::check(const Dict& saved) const {
  const auto& modules = list_of(saved, "modules");
  const auto& optimizers = list_of(saved, "optimizers");
  const auto& loaders = list_of(saved, "loaders");
  const auto compare = [&](size_t ours, size_t theirs, const std::string& what) {
    if (ours == theirs || part_of(saved, what) == nullptr) return;
    throw LayoutMismatch("the checkpoint is of " + std::to_string(theirs) + " " + what + ", and " +
                         std::to_string(ours) +
                         " are prepared; prepare() what the job that saved it had prepared, in the same order, before "
                         "load()");
  };
  compare(strategy_.modules.size(), modules.size(), "modules");
  compare(strategy_.optimizers.size(), optimizers.size(), "optimizers");
  compare(strategy_.loaders.places().size(), loaders.size(), "loaders");
  for (size_t i = 0; i < modules.size(); ++i) {
    check_module(*strategy_.modules[i].replicas().front(), modules[i].get<Dict>(), "module " + std::to_string(i));
  }
  for (size_t i = 0; i < optimizers.size(); ++i) {
    const auto& optimizer = *strategy_.optimizers[i];
    detail::check_optimizer(optimizer, detail::parameter_names(optimizer, strategy_.core->session().registry()),
                            optimizers[i].get<Dict>(), "optimizer " + std::to_string(i));
  }
  for (size_t i = 0; i < loaders.size(); ++i) {
    const auto& generators = member(loaders[i].get<Dict>(), "generators").get<List>();
    if (generators.empty() || !strategy_.loaders.places()[i]->is_known) continue;
    throw LayoutMismatch("loader " + std::to_string(i) + " was saved with the states of " +
                         std::to_string(generators.size()) +
                         " generators of its own, which a loader has not in C++; go on in Python");
  }
}

void Saving::take(const Dict& saved) {
  const auto& modules = list_of(saved, "modules");
  for (size_t i = 0; i < modules.size(); ++i) {
    take_module(*strategy_.modules[i].replicas().front(), modules[i].get<Dict>());
  }
  tables_.take();
  auto& core = *strategy_.core;
  const auto& optimizers = list_of(saved, "optimizers");
  other_options_.assign(optimizers.size(), {});
  for (size_t i = 0; i < optimizers.size(); ++i) {
    auto& optimizer = *strategy_.optimizers[i];
    if (detail::flat_state_of(optimizer) != nullptr) strategy_.bind_flat(optimizer);
    const auto names = detail::parameter_names(optimizer, core.session().registry());
    other_options_[i] = detail::load_optimizer(optimizer, names, optimizers[i].get<Dict>());
  }
  const auto& loaders = list_of(saved, "loaders");
  for (size_t i = 0; i < loaders.size(); ++i) {
    const auto& theirs = loaders[i].get<Dict>();
    auto& place = *strategy_.loaders.places()[i];
    const LoaderState state{integer(theirs, "epoch"), integer(theirs, "batches")};
    take_state(place, place.is_known ? state : LoaderState{.epoch = state.epoch});
    if (place.is_known || state.batches == 0) continue;
    log(LogLevel::warning, "parameter servers deal the batches, so that epoch " + std::to_string(state.epoch) +
                               " begins anew: its first " + std::to_string(state.batches) + " batches come once more");
  }
  for (const auto& scale : list_of(saved, "loss_scales")) take_loss_scale(scale.get<Dict>());
  if (const auto* const part = part_of(saved, "strategy")) {
    const auto& job = part->get<Dict>();
    // Servers give joiners the seed that the job began with.
    std::optional<uint64_t> seed;
    if (!has_servers()) seed = seed_of(member(job, "seed").get<std::string>());
    core.stepper().go_on_after(integer(job, "steps"), static_cast<uint64_t>(integer(job, "calls")), seed);
  }
  if (const auto* const states = part_of(saved, "generators")) take_generators(states->get<at::Tensor>());
}

void Saving::take_loss_scale(const Dict& saved) {
  if (!strategy_.core->session().options().loss_scale) return;
  std::vector<int> positions;
  for (const auto& position : member(saved, "optimizers").get<List>()) {
    positions.push_back(static_cast<int>(position.get<int64_t>()));
  }
  auto choice = strategy_.choice_of(std::move(positions));
  const auto chosen = choice.optimizers;
  const int set = strategy_.sets.set_of(std::move(choice), [&] { return strategy_.members_of(chosen); });
  const auto& scale = member(saved, "scale").get<Dict>();
  strategy_.core->sets().at(set).window().loss_scale().set(
      {static_cast<float>(member(scale, "scale").get<double>()), static_cast<int>(integer(scale, "_growth_tracker"))});
}

// Where as many workers go on: each its own.
void Saving::take_generators(const at::Tensor& states) const {
  const auto& topology = strategy_.core->session().topology();
  if (states.size(0) != topology.num_workers) return;
  auto generator = at::globalContext().defaultGenerator(c10::Device(c10::kCPU));
  const std::lock_guard lock(generator.mutex());
  generator.set_state(states[topology.rank].clone());  // torch takes no view
}

}  // namespace muster
