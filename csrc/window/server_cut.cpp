#include "window/server_cut.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <utility>

#include "core/flat_layout.h"
#include "muster/error.h"
#include "server/shard/shard_part.h"

namespace muster {

using server::Part;

ServerCut::ServerCut(const server::Plan& plan, const server::WritePart& request,
                     const std::vector<server::WritesPart>& answers)
    : plan_(plan), request_(request) {
  for (size_t s = 0; s < answers.size(); ++s) {
    if (answers[s].refusal.empty()) continue;
    refusal_ = "parameter server " + std::to_string(s) + ": " + answers[s].refusal;
    return;
  }
  std::map<uint32_t, uint8_t> states;
  for (const auto& answer : answers) {
    for (const auto& part : answer.parameters) {
      if (part.parameter >= plan_.parameters.size()) throw CommError("a server writes a parameter that there is not");
      const auto& spec = plan_.parameters[part.parameter];
      const auto [known, is_new] = states.emplace(part.parameter, part.states);
      if (is_new) {
        add_parameter(spec, part);
      } else if (known->second != part.states) {
        throw CheckpointError("'" + spec.name +
                              "' was stepped for the first time while the parameter servers began to write it; save "
                              "again");
      }
    }
    if (answer.tables.size() != plan_.tables.size()) throw CommError("a server writes other tables than there are");
  }
  add_tables(answers);
}

at::Tensor ServerCut::stand_in(at::IntArrayRef sizes, at::ScalarType dtype, Named named) {
  auto tensor = at::empty(sizes, at::TensorOptions(dtype).device(at::kMeta));
  names_.emplace(tensor.storage().unsafeGetStorageImpl(), std::move(named));
  return tensor;
}

void ServerCut::add_parameter(const ParameterSpec& spec, const server::PartOfParameter& part) {
  auto& known = parameters_[part.parameter];
  known.steps = part.steps;
  if (is_left(part.parameter)) return;
  const auto add = [&](Part which, at::ScalarType dtype) {
    known.parts[which] = stand_in(spec.sizes, dtype, {server::name_in_part(spec, which)});
  };
  add(Part::parameter, spec.dtype);
  const auto of_state = spec.dtype == at::kDouble ? at::kDouble : at::kFloat;
  constexpr Part kStates[] = {Part::state0, Part::state1, Part::state2, Part::master};
  for (size_t bit = 0; bit < std::size(kStates); ++bit) {
    if ((part.states >> bit & 1) != 0) add(kStates[bit], of_state);
  }
}

void ServerCut::add_tables(const std::vector<server::WritesPart>& answers) {
  for (const uint32_t table : request_.tables) {
    const auto& spec = plan_.tables[table];
    int64_t rows = 0;
    uint64_t steps = answers.front().tables[table].steps;
    for (const auto& answer : answers) {
      rows += static_cast<int64_t>(answer.tables[table].rows);
      steps = std::min(steps, answer.tables[table].steps);
    }
    const int64_t width = server::empty_table(spec, plan_.groups).state_width();
    tables_.emplace(table, TableContents{stand_in({rows}, at::kLong, {server::name_of_rows(spec)}),
                                         stand_in({rows, spec.dim}, at::kFloat, {server::name_of_row_values(spec)}),
                                         stand_in({rows, width}, at::kFloat, {"", &spec}), steps});
  }
}

std::vector<std::string> ServerCut::writers() const {
  std::vector<std::string> writers;
  for (uint32_t s = 0; s < plan_.servers; ++s) writers.push_back(server::writer_of_server(s, request_.id));
  return writers;
}

bool ServerCut::is_left(size_t parameter) const {
  return std::ranges::binary_search(request_.left, static_cast<uint32_t>(parameter));
}

at::Tensor ServerCut::part(size_t parameter, Part part) const {
  const auto known = parameters_.find(static_cast<uint32_t>(parameter));
  if (known == parameters_.end()) return {};
  if (part == Part::steps) return at::scalar_tensor(known->second.steps, at::kFloat);
  const auto found = known->second.parts.find(part);
  return found == known->second.parts.end() ? at::Tensor() : found->second;
}

TableContents ServerCut::contents(size_t table) const { return tables_.at(static_cast<uint32_t>(table)); }

std::optional<std::string> ServerCut::name_of(const at::Tensor& tensor) const {
  if (!tensor.is_meta()) return std::nullopt;
  const auto found = names_.find(tensor.storage().unsafeGetStorageImpl());
  if (found == names_.end()) return std::nullopt;
  const auto* const table = found->second.states_of;
  if (table == nullptr) return found->second.name;
  const int64_t width = table->row_wise_adagrad ? 1 : table->dim;
  return server::name_of_row_states(*table, static_cast<size_t>(tensor.storage_offset() / width));
}

bool is_row_major(at::IntArrayRef sizes, at::IntArrayRef strides) {
  int64_t next = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    if (sizes[d] == 1) continue;
    if (strides[d] != next) return false;
    next *= sizes[d];
  }
  return true;
}

}  // namespace muster
