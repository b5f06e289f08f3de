#include "strategy/saved_tables.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "core/control_group.h"
#include "muster/error.h"
#include "muster/sharded_embedding.h"
#include "strategy/registration.h"
#include "strategy/saved_parts.h"
#include "strategy/strategy_state.h"

namespace muster {

namespace {

using detail::integer;
using detail::list_of;
using detail::member;
using Dict = SavedTables::Dict;
using List = SavedTables::List;

constexpr const char* kNormal = "normal";
constexpr const char* kUniform = "uniform";

const at::Tensor& tensor(const Dict& table, const std::string& key) { return member(table, key).get<at::Tensor>(); }

std::vector<std::pair<int64_t, std::string>> places_of(const Dict& table) {
  std::vector<std::pair<int64_t, std::string>> places;
  for (const auto& place : member(table, "places").get<List>()) {
    const auto& both = place.get<List>();
    if (both.size() != 2) throw CheckpointError("a table in the checkpoint has no place; load another one");
    places.emplace_back(both[0].get<int64_t>(), both[1].get<std::string>());
  }
  if (places.empty()) throw CheckpointError("a table in the checkpoint has no place; load another one");
  return places;
}

RowInitialiser initialiser_of(const Dict& table) {
  const auto& init = member(table, "init").get<std::string>();
  const auto& seed = member(table, "seed").get<std::string>();
  RowInitialiser initialiser{RowInitialiser::Kind::normal, member(table, "scale").get<double>(), 0};
  if (init == kUniform) initialiser.kind = RowInitialiser::Kind::uniform;
  const char* const end = seed.data() + seed.size();
  const auto [stop, error] = std::from_chars(seed.data(), end, initialiser.seed);
  if ((init == kNormal || init == kUniform) && error == std::errc() && stop == end) return initialiser;
  throw CheckpointError("a table in the checkpoint begins with '" + init + "' rows of the seed '" + seed +
                        "', which there are none of; load another one");
}

// By kind: exp_avg, exp_avg_sq, max_exp_avg_sq. The order of the alphabet is that of the optimizer's columns.
std::vector<std::pair<std::string, at::Tensor>> states_of(const Dict& table) {
  std::vector<std::pair<std::string, at::Tensor>> states;
  for (const auto& [kind, columns] : member(table, "state").get<Dict>()) {
    states.emplace_back(kind, columns.get<at::Tensor>());
  }
  return states;
}

// Throws CheckpointError where its tensors do not belong together.
void check_table(const Dict& table, size_t number) {
  const auto fail = [&](const std::string& what) {
    throw CheckpointError("'tables/" + std::to_string(number) + "/" + what +
                          "' contradicts the rest of the checkpoint; load another one");
  };
  const auto& rows = tensor(table, "rows");
  if (!are_rows_of(rows, integer(table, "num_rows"))) fail("rows");
  const auto& values = tensor(table, "values");
  if (!are_of_rows(values, rows) || values.size(1) != integer(table, "dim")) fail("values");
  for (const auto& [kind, columns] : states_of(table)) {
    if (!are_of_rows(columns, rows)) fail("state/" + kind);
  }
}

at::Tensor whole_of(const at::Tensor& rows, const at::Tensor& values, const at::Tensor& whole) {
  return whole.index_copy_(0, rows, values);
}

// Puts a table's whole weight and state where modules and optimizers have theirs.
void make_dense(Dict& saved, const Dict& table) {
  const int64_t num_rows = integer(table, "num_rows");
  const auto& rows = tensor(table, "rows");
  const auto states = states_of(table);
  const auto places = places_of(table);
  auto width = static_cast<double>(integer(table, "dim"));
  for (const auto& [kind, columns] : states) width += static_cast<double>(columns.size(1));
  if (static_cast<double>(num_rows) * width * sizeof(float) > static_cast<double>(memory_limit())) {
    throw InvalidArgument("'" + places.front().second + "' is a table of " + std::to_string(num_rows) +
                          " rows on parameter servers, which as a dense weight with its state takes more memory than "
                          "this machine has; use ParameterServerStrategy and on_servers");
  }
  auto weight = at::empty({num_rows, integer(table, "dim")}, at::kFloat);
  initialiser_of(table).fill_rows(weight);
  weight = whole_of(rows, tensor(table, "values"), weight);
  auto modules = list_of(saved, "modules");
  for (const auto& [number, name] : places) {
    if (number < 0 || static_cast<size_t>(number) >= modules.size()) {
      throw CheckpointError("a table in the checkpoint is of module " + std::to_string(number) +
                            ", which is not in it; load another one");
    }
    auto module = modules[static_cast<size_t>(number)].get<Dict>();
    module[name] = weight;
    modules[static_cast<size_t>(number)] = std::move(module);
  }
  saved["modules"] = std::move(modules);
  auto optimizers = list_of(saved, "optimizers");
  const auto& step = member(table, "step");
  if (member(table, "optimizer").is_null() || optimizers.empty() || (states.empty() && step.is_null())) return;
  auto& of = optimizers.at(static_cast<size_t>(integer(table, "optimizer")));
  auto optimizer = of.get<Dict>();
  auto all = member(optimizer, "state").get<Dict>();
  Dict values;
  for (const auto& [kind, columns] : states) {
    values[kind] = whole_of(rows, columns, at::zeros({num_rows, columns.size(1)}, at::kFloat));
  }
  if (!step.is_null()) values["step"] = step;
  all[member(table, "parameter").get<std::string>()] = std::move(values);
  optimizer["state"] = std::move(all);
  of = std::move(optimizer);
  saved["optimizers"] = std::move(optimizers);
}

}  // namespace

bool is_on_servers(const torch::nn::Module& module) {
  const auto* const embedding = module.as<ShardedEmbeddingImpl>();
  return embedding != nullptr && embedding->options().on_servers;
}

std::vector<SavedTables::Embedding> SavedTables::on_servers() const {
  std::vector<Embedding> found;
  for (size_t number = 0; number < strategy_.modules.size(); ++number) {
    for (const auto& submodule : strategy_.modules[number].replicas().front()->named_modules()) {
      if (!is_on_servers(*submodule.value())) continue;
      const auto& weight = submodule.value()->as<ShardedEmbeddingImpl>()->weight;
      const auto known =
          std::find_if(found.begin(), found.end(), [&](const Embedding& e) { return e.weight.is_same(weight); });
      auto& embedding = known == found.end() ? found.emplace_back(Embedding{weight, {}}) : *known;
      embedding.places.emplace_back(number, submodule.key().empty() ? "weight" : submodule.key() + ".weight");
    }
  }
  return found;
}

List SavedTables::state() const {
  List tables;
  for (const auto& embedding : on_servers()) tables.emplace_back(state_of(embedding));
  return tables;
}

Dict SavedTables::state_of(const Embedding& embedding) const {
  const auto& registry = strategy_.core->session().registry();
  const int parameter = registry.find(embedding.weight);
  const auto& rows = *registry.rows_of(static_cast<size_t>(parameter));
  const auto contents = strategy_.core->sets().table_contents(parameter);
  List places;
  for (const auto& [number, name] : embedding.places) places.emplace_back(List{number, name});
  const bool is_normal = rows.initialiser.kind == RowInitialiser::Kind::normal;
  Dict table{{"places", std::move(places)},
             {"num_rows", embedding.weight.size(0)},
             {"dim", embedding.weight.size(1)},
             {"init", is_normal ? kNormal : kUniform},
             {"scale", rows.initialiser.scale},
             {"seed", std::to_string(rows.initialiser.seed)},
             {"optimizer", SavedValue()},
             {"parameter", SavedValue()},
             {"rows", contents.rows},
             {"values", contents.values},
             {"step", SavedValue()}};
  const auto known = loaded_.find(parameter);
  Kinds kinds = known == loaded_.end() ? Kinds() : known->second;
  for (size_t i = 0; i < strategy_.optimizers.size(); ++i) {
    auto& optimizer = strategy_.optimizer(i);
    const auto parameters = detail::parameters_of(optimizer);
    const bool has_it = std::any_of(parameters.begin(), parameters.end(),
                                    [&](const at::Tensor& each) { return each.is_same(embedding.weight); });
    if (!has_it) continue;
    table["optimizer"] = static_cast<int64_t>(i);
    table["parameter"] = registry.name(static_cast<size_t>(parameter));
    const auto* const flat = detail::flat_state_of(optimizer);
    if (!strategy_.core->sets().has_servers() || flat == nullptr || !*flat) continue;
    const auto names = (*flat)->flat.state().names();
    kinds = Kinds{{names.begin(), names.end()}, dynamic_cast<torch::optim::SGD*>(&optimizer) == nullptr};
  }
  // Of kinds that the optimizer's options leave out there are no columns.
  const int64_t width = rows.row_wise_adagrad ? 1 : embedding.weight.size(1);
  Dict state;
  for (int64_t k = 0; (k + 1) * width <= contents.states.size(1); ++k) {
    const auto columns = contents.states.narrow(1, k * width, width);
    // A stand-in is known by its place.
    state[kinds.names.at(static_cast<size_t>(k))] = columns.is_meta() ? columns : columns.contiguous();
  }
  if (kinds.count_steps) table["step"] = at::scalar_tensor(static_cast<double>(contents.steps), at::kFloat);
  table["state"] = std::move(state);
  return table;
}

checkpoint::SavedTree SavedTables::for_others(checkpoint::SavedTree tree) const {
  const auto embeddings = on_servers();
  if (embeddings.empty()) return tree;
  const auto saved = checkpoint::decode_tree(tree, "what was read").get<Dict>();
  const auto tables = list_of(saved, "tables");
  for (size_t number = 0; number < tables.size(); ++number) {
    const auto places = places_of(tables[number].get<Dict>());
    const bool is_theirs = std::any_of(embeddings.begin(), embeddings.end(), [&](const Embedding& embedding) {
      return std::find(places.begin(), places.end(), embedding.places.front()) != places.end();
    });
    if (!is_theirs) continue;
    const std::string prefix = "tables/" + std::to_string(number) + "/";
    for (auto& [name, tensor] : tree.tensors) {
      if (name.starts_with(prefix) && tensor.dim() > 0) tensor = tensor.narrow(0, 0, 0);
    }
  }
  return tree;
}

// Rows of a dense weight that differ from the embedding's first ones; the weight goes from `saved`. False where there
// is none.
bool SavedTables::make_sparse(Dict& saved, const Embedding& embedding, Dict& table) const {
  constexpr int64_t kBlockElements = int64_t{1} << 20;
  const auto& [number, name] = embedding.places.front();
  auto modules = list_of(saved, "modules");
  if (static_cast<size_t>(number) >= modules.size()) return false;
  const auto& of_module = modules[static_cast<size_t>(number)].get<Dict>();
  const auto found = of_module.find(name);
  if (found == of_module.end() || !found->second.holds<at::Tensor>()) return false;
  const auto weight = found->second.get<at::Tensor>();
  if (weight.dim() != 2 || weight.scalar_type() != at::kFloat) return false;
  const auto& registry = strategy_.core->session().registry();
  const auto parameter = static_cast<size_t>(registry.find(embedding.weight));
  const auto& initialiser = registry.rows_of(parameter)->initialiser;
  Dict state;
  SavedValue step;
  auto optimizers = list_of(saved, "optimizers");
  for (auto& of : optimizers) {
    auto optimizer = of.get<Dict>();
    auto all = member(optimizer, "state");
    if (!all.holds<Dict>()) continue;  // known by numbers: they stay with the optimizer, which has no room for them
    auto by_name = all.get<Dict>();
    const auto values = by_name.find(registry.name(parameter));
    if (values == by_name.end()) continue;
    for (const auto& [kind, value] : values->second.get<Dict>()) {
      if (kind == "step") step = value;
      if (value.holds<at::Tensor>() && value.get<at::Tensor>().dim() == 2) state[kind] = value;
    }
    by_name.erase(values);
    optimizer["state"] = std::move(by_name);
    of = std::move(optimizer);
  }
  for (const auto& [other, alias] : embedding.places) {
    auto module = modules[static_cast<size_t>(other)].get<Dict>();
    module.erase(alias);
    modules[static_cast<size_t>(other)] = std::move(module);
  }
  saved["modules"] = std::move(modules);
  if (!optimizers.empty()) saved["optimizers"] = std::move(optimizers);
  const int64_t block = std::max<int64_t>(kBlockElements / weight.size(1), 1);
  std::vector<at::Tensor> rows{at::empty({0}, at::kLong)};
  for (int64_t first = 0; first < weight.size(0); first += block) {
    const int64_t count = std::min(block, weight.size(0) - first);
    const auto begun = at::empty({count, weight.size(1)}, at::kFloat);
    initialiser.fill_rows(begun, first);
    auto differs = weight.narrow(0, first, count).ne(begun).any(1);
    for (const auto& [kind, columns] : state) {
      differs = differs.logical_or(columns.get<at::Tensor>().narrow(0, first, count).ne(0).any(1));
    }
    rows.push_back(differs.nonzero().view({-1}) + first);
  }
  const auto numbers = at::cat(rows);
  for (auto& [kind, columns] : state) columns = columns.get<at::Tensor>().index_select(0, numbers);
  const bool is_normal = initialiser.kind == RowInitialiser::Kind::normal;
  table = {{"num_rows", weight.size(0)},
           {"dim", weight.size(1)},
           {"init", is_normal ? kNormal : kUniform},
           {"scale", initialiser.scale},
           {"seed", std::to_string(initialiser.seed)},
           {"rows", numbers},
           {"values", weight.index_select(0, numbers)},
           {"step", step},
           {"state", std::move(state)}};
  return true;
}

void SavedTables::place(Dict& saved) {
  const at::NoGradGuard no_grad;
  placed_.clear();
  const auto tables = list_of(saved, "tables");
  for (size_t number = 0; number < tables.size(); ++number) check_table(tables[number].get<Dict>(), number);
  std::vector<bool> stay(tables.size());
  for (const auto& embedding : on_servers()) {
    Dict table;
    bool is_found = false;
    for (size_t number = 0; number < tables.size() && !is_found; ++number) {
      const auto places = places_of(tables[number].get<Dict>());
      is_found = std::find(places.begin(), places.end(), embedding.places.front()) != places.end();
      stay[number] = stay[number] || is_found;
      if (is_found) table = tables[number].get<Dict>();
    }
    if (!is_found && !make_sparse(saved, embedding, table)) continue;  // comparing modules says what is missing
    const std::vector<int64_t> theirs{integer(table, "num_rows"), integer(table, "dim")};
    if (embedding.weight.sizes() != at::IntArrayRef(theirs)) {
      throw LayoutMismatch("'" + embedding.places.front().second + "' has shape " + c10::str(embedding.weight.sizes()) +
                           ", and in the checkpoint " + c10::str(at::IntArrayRef(theirs)) +
                           "; build the model that was saved");
    }
    placed_.push_back({strategy_.core->session().registry().find(embedding.weight), std::move(table)});
  }
  for (size_t number = 0; number < tables.size(); ++number) {
    if (!stay[number]) make_dense(saved, tables[number].get<Dict>());
  }
}

void SavedTables::take() {
  for (const auto& [parameter, table] : placed_) {
    const auto& rows = tensor(table, "rows");
    std::vector<at::Tensor> columns{at::empty({rows.size(0), 0}, at::kFloat)};
    Kinds kinds;
    for (const auto& [kind, values] : states_of(table)) {
      kinds.names.push_back(kind);
      columns.push_back(values);
    }
    const auto& step = member(table, "step");
    kinds.count_steps = !step.is_null();
    const auto steps = kinds.count_steps ? static_cast<uint64_t>(step.get<at::Tensor>().item<float>()) : 0;
    begin_with(strategy_.core->session(), parameter, initialiser_of(table),
               {rows.contiguous(), tensor(table, "values").contiguous(), at::cat(columns, 1), steps});
    loaded_[parameter] = std::move(kinds);
  }
  placed_.clear();
}

}  // namespace muster
