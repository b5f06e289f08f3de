// Saving::load.
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <charconv>
#include <functional>
#include <mutex>
#include <utility>

#include "checkpoint/asked_snapshot.h"
#include "checkpoint/saved_tree.h"
#include "checkpoint/snapshot.h"
#include "comm/text_exchange.h"
#include "core/log.h"
#include "muster/error.h"
#include "strategy/collectives.h"
#include "strategy/gathered_snapshot.h"
#include "strategy/saved_dtypes.h"
#include "strategy/saved_modules.h"
#include "strategy/saved_parts.h"
#include "strategy/saved_passes.h"
#include "strategy/saving.h"
#include "strategy/strategy_state.h"
#include "window/loss_scale.h"

namespace muster {

namespace {

namespace fs = std::filesystem;
using detail::integer;
using detail::kFormat;
using detail::list_of;
using detail::member;
using detail::part_of;
using List = SavedValue::List;
using Dict = SavedValue::Dict;

uint64_t seed_of(const std::string& text) {
  uint64_t seed = 0;
  const char* const end = text.data() + text.size();
  if (const auto [stop, error] = std::from_chars(text.data(), end, seed); error == std::errc() && stop == end)
    return seed;
  throw CheckpointError("a checkpoint has the seed '" + text + "', which is none; load another one");
}

// Of a snapshot's metadata.
template <class T>
const T* value_in(const checkpoint::Metadata& metadata, const std::string& key) {
  const auto found = metadata.find(key);
  return found == metadata.end() ? nullptr : std::get_if<T>(&found->second);
}

}  // namespace

std::optional<SavedState> Saving::load(const fs::path& folder) {
  const c10::InferenceMode normal(false);  // steps write what it makes, outside of a caller's inference mode
  const at::NoGradGuard no_grad;
  check_callable("load");
  if (folder.empty()) throw InvalidArgument("load() was given an empty path; name the folder that save() wrote");
  if (strategy_.core->sets().has_servers()) {
    throw InvalidArgument(
        "parameter servers hold values and state from the first step on; load() before it, in a new job");
  }
  const bool joins = strategy_.core->session().groups().joins();
  std::optional<Found> found;
  const bool is_alone = joins || strategy_.core->session().topology().num_workers == 1;
  together("load", joins, [&] { finish(); });
  auto snapshot = is_alone ? checkpoint::read_asked_snapshot(folder, checkpoint::Memory::of_file)
                           : read_asked_snapshot(strategy_.workers("load()").group, folder);
  together("load", joins, [&] {
    if (snapshot && is_alone) checkpoint::copy_what_is_kept(snapshot->tensors);
    if (snapshot) found = found_in(std::move(*snapshot), folder);
  });
  if (!joins) found = broadcast(std::move(found));
  if (!found) return std::nullopt;
  const auto place = (checkpoint::asked_snapshot(folder).folder / found->name).string();
  const auto together_of_place = [&](const std::function<void()>& act) {
    together("load", joins, [&] {
      try {
        act();
      } catch (const LayoutMismatch& problem) {
        throw LayoutMismatch("'" + place + "': " + problem.what());
      } catch (const InvalidArgument& problem) {
        throw CheckpointError("'" + place + "' is no checkpoint of a strategy (" + problem.what() +
                              "); load another one");
      }
    });
  };
  Dict saved;
  SavedState state;
  together_of_place([&] {
    saved = checkpoint::decode_tree(found->tree, place).get<Dict>();
    const auto* const named = part_of(saved, "state");
    for (const auto& [name, value] : named == nullptr ? Dict() : named->get<Dict>()) {
      const auto& held = value.get<Dict>();
      if (held.size() == 1) state.emplace(name, held.begin()->second);  // of an object of Python's, its state_dict
    }
    if (joins) return;  // it has the rest from the servers, a later one
    tables_.place(saved);
    check(saved);
  });
  if (!joins) together_of_place([&] { take(saved); });
  return state;
}

std::optional<KeptMetric> Saving::kept_metric(const fs::path& folder) {
  check_callable("best");
  together("best", false, [&] { finish(); });
  return muster::kept_metric(strategy_.workers("best()").group, folder);
}

Saving::Found Saving::found_in(checkpoint::StoredSnapshot snapshot, const fs::path& folder) {
  const auto* const format = value_in<int64_t>(snapshot.metadata, "muster.format");
  const auto* const document = value_in<std::string>(snapshot.metadata, "content");
  if (format == nullptr || document == nullptr) {
    throw CheckpointError("what is in '" + folder.string() +
                          "' are no checkpoints of a strategy; give the folder that save() wrote");
  }
  if (*format != kFormat) {
    const auto* const by = value_in<std::string>(snapshot.metadata, "muster.version");
    throw CheckpointError("the checkpoints in '" + folder.string() + "' are of format " + std::to_string(*format) +
                          ", and this Muster reads " + std::to_string(kFormat) +
                          "; load them with the version that wrote them (" + (by != nullptr ? *by : "unknown") + ")");
  }
  const auto* const lineage = value_in<std::string>(snapshot.metadata, "muster.lineage");
  lineage_ = lineage == nullptr ? "" : *lineage;
  return {{*document, std::move(snapshot.tensors)}, snapshot.folder.filename().string()};
}

// Collective, but where there is one worker: the chief's.
std::optional<Saving::Found> Saving::broadcast(std::optional<Found> found) {
  if (strategy_.core->session().topology().num_workers == 1) return found;
  const auto call = strategy_.workers("load()");
  auto& workers = call.group;
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
  tensors = send_over_workers(workers, tensors, 0);
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
  const auto compare = [&](size_t ours, size_t theirs, const std::string& what) {
    if (ours == theirs || part_of(saved, what) == nullptr) return;
    throw LayoutMismatch("the checkpoint is of " + std::to_string(theirs) + " " + what + ", and " +
                         std::to_string(ours) +
                         " are prepared; prepare() what the job that saved it had prepared, in the same order, before "
                         "load()");
  };
  compare(strategy_.modules.size(), modules.size(), "modules");
  compare(strategy_.optimizers.size(), optimizers.size(), "optimizers");
  for (size_t i = 0; i < modules.size(); ++i) {
    detail::check_module(*strategy_.modules[i].replicas().front(), modules[i].get<Dict>(),
                         "module " + std::to_string(i));
  }
  for (size_t i = 0; i < optimizers.size(); ++i) {
    const auto& optimizer = strategy_.optimizer(i);
    detail::check_optimizer(optimizer, detail::parameter_names(optimizer, strategy_.core->session().registry()),
                            optimizers[i].get<Dict>(), "optimizer " + std::to_string(i));
  }
  strategy_.loaders.check(list_of(saved, "loaders"));
}

void Saving::take(const Dict& saved) {
  auto& core = *strategy_.core;
  std::vector<const torch::nn::Module*> prepared;
  std::vector<Dict> modules;
  for (const auto& module : list_of(saved, "modules")) {
    prepared.push_back(strategy_.modules[modules.size()].replicas().front().get());
    modules.push_back(module.get<Dict>());
  }
  std::vector<detail::OptimizerToLoad> optimizers;
  const auto& saved_optimizers = list_of(saved, "optimizers");
  for (size_t i = 0; i < saved_optimizers.size(); ++i) {
    auto& optimizer = strategy_.optimizer(i);
    if (detail::flat_state_of(optimizer) != nullptr) strategy_.bind_flat(optimizer);
    auto names = detail::parameter_names(optimizer, core.session().registry());
    auto state = detail::with_names(saved_optimizers[i].get<Dict>(), names);
    optimizers.push_back({optimizer, std::move(names), std::move(state)});
  }
  detail::follow_dtypes(prepared, modules, optimizers);
  for (size_t i = 0; i < modules.size(); ++i) detail::take_module(*prepared[i], modules[i]);
  tables_.take();
  other_options_.clear();
  for (const auto& [optimizer, names, state] : optimizers) {
    other_options_.push_back(detail::load_optimizer(optimizer, names, state));
  }
  strategy_.loaders.take(list_of(saved, "loaders"));
  for (const auto& scale : list_of(saved, "loss_scales")) take_loss_scale(scale.get<Dict>());
  if (const auto* const part = part_of(saved, "strategy")) {
    const auto& job = part->get<Dict>();
    // Other numbers of replicas have other usual parts.
    if (integer(job, "replicas") == core.session().topology().num_replicas) {
      for (const auto& each : list_of(saved, "units")) {
        const auto& unit = each.get<Dict>();
        scale_of(unit).set_unit(member(unit, "unit").get<double>());
      }
    }
    core.stepper().go_on_after(integer(job, "steps"), static_cast<uint64_t>(integer(job, "calls")),
                               seed_of(member(job, "seed").get<std::string>()));
  } else {
    const auto& streams = core.session().streams();
    core.stepper().go_on_after(core.stepper().steps(), streams.calls(), streams.seed());
  }
  if (const auto* const states = part_of(saved, "generators")) take_generators(states->get<at::Tensor>());
  if (const auto* const states = part_of(saved, "random")) random_ = *states;
}

void Saving::take_loss_scale(const Dict& saved) {
  if (!loss_scale_rule(strategy_.core->session().options())) return;
  const auto& scale = member(saved, "scale").get<Dict>();
  scale_of(saved).set(
      {static_cast<float>(member(scale, "scale").get<double>()), static_cast<int>(integer(scale, "_growth_tracker"))});
}

WindowScale& Saving::scale_of(const Dict& saved) {
  std::vector<int> positions;
  for (const auto& position : member(saved, "optimizers").get<List>()) {
    positions.push_back(static_cast<int>(position.get<int64_t>()));
  }
  auto choice = strategy_.choice_of(std::move(positions));
  const auto chosen = choice.optimizers;
  const int set =
      strategy_.sets.set_of(std::move(choice), [&] { return strategy_.members_of(chosen); }, /*may_share=*/true);
  return strategy_.core->sets().at(set).window().loss_scale();
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
