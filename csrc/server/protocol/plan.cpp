#include "server/protocol/plan.h"

#include <algorithm>
#include <cmath>
#include <unordered_set>
#include <variant>

#include "kernels/kernels.h"
#include "muster/error.h"

namespace muster::server {

namespace {

constexpr int64_t kTile = static_cast<int64_t>(kernels::kTile);
constexpr int64_t kMaxNumel = int64_t{1} << 40;
constexpr int64_t kLeast = 1;  // elements of a chunk that a piece takes: one of none has state, too

void check(bool is_valid, const std::string& what) {
  if (!is_valid) throw InvalidArgument("a parameter server cannot hold this model: " + what);
}

int64_t numel_of(const ParameterSpec& parameter) {
  int64_t numel = 1;
  for (const int64_t size : parameter.sizes) {
    check(size >= 0 && size <= kMaxNumel && (numel == 0 || size <= kMaxNumel / numel),
          "the sizes of parameter '" + parameter.name + "' are out of range");
    numel *= size;
  }
  return numel;
}

bool is_steppable(c10::ScalarType dtype) {
  return dtype == c10::kFloat || dtype == c10::kDouble || dtype == c10::kBFloat16 || dtype == c10::kHalf;
}

void check_table(const TableSpec& table) {
  check(table.num_rows >= 1 && table.num_rows <= kMaxRows && table.dim >= 1 && table.dim <= kMaxRowDim,
        "the sizes of table '" + table.name + "' are out of range");
  check(table.placement == RowPlacement::modulo || table.placement == RowPlacement::range,
        "the placement of table '" + table.name + "' is unknown");
  const auto kind = table.initialiser.kind;
  check((kind == RowInitialiser::Kind::normal || kind == RowInitialiser::Kind::uniform) &&
            std::isfinite(table.initialiser.scale) && table.initialiser.scale >= 0,
        "the initial values of table '" + table.name + "' are out of range");
}

// Fills the chunks of one server after another.
class Cutter {
 public:
  Cutter(const Plan& plan, std::vector<Chunk>& chunks) : plan_(plan), chunks_(chunks) {}

  void add(int server, int parameter, Run run) {
    const auto dtype = plan_.parameters[static_cast<size_t>(parameter)].dtype;
    const auto gradient = accumulation_dtype(dtype);
    const auto size = static_cast<int64_t>(c10::elementSize(gradient));
    const int64_t alignment = FlatLayout::kSlotAlignment / size;
    const int64_t capacity = static_cast<int64_t>(plan_.chunk_bytes) / size;
    while (true) {
      const bool goes_on = !chunks_.empty() && chunks_.back().server == server && chunks_.back().dtype == dtype;
      const int64_t room = goes_on ? capacity - chunks_.back().numel : 0;
      const int64_t wanted = std::max(run.count, kLeast);
      const int64_t slot = wanted <= room ? wanted : room / kTile * kTile;
      if (slot <= 0) {
        chunks_.push_back({server, dtype, gradient, {}, 0});
        continue;
      }
      const int64_t taken = std::min(slot, run.count);
      auto& chunk = chunks_.back();
      chunk.pieces.push_back({parameter, {run.begin, taken}, chunk.numel});
      chunk.numel += (slot + alignment - 1) / alignment * alignment;
      if (taken == run.count) return;
      run = {run.begin + taken, run.count - taken};
    }
  }

 private:
  const Plan& plan_;
  std::vector<Chunk>& chunks_;
};

}  // namespace

void Plan::validate() const {
  check((!parameters.empty() || !tables.empty()) && parameters.size() <= kMaxParameters && tables.size() <= kMaxTables,
        "it has no parameters, or too many");
  check(group_of.size() == parameters.size(), "not every parameter is in a group");
  const size_t num_groups = std::visit([](const auto& list) { return list.size(); }, groups);
  check(num_groups > 0 && num_groups <= kMaxGroups, "it has no parameter groups, or too many");
  std::unordered_set<std::string_view> names;
  int64_t total = 0;
  for (size_t p = 0; p < parameters.size(); ++p) {
    const auto& parameter = parameters[p];
    check(names.insert(parameter.name).second, "two parameters are named '" + parameter.name + "'");
    check(is_steppable(parameter.dtype), "the dtype of parameter '" + parameter.name + "' is no floating one");
    check(parameter.sizes.size() == parameter.strides.size() && parameter.sizes.size() <= kMaxDims,
          "the dimensions of parameter '" + parameter.name + "' are out of range");
    check(group_of[p] < num_groups, "parameter '" + parameter.name + "' is in no group");
    total += numel_of(parameter);
    check(total <= kMaxNumel, "it is too large");
  }
  std::unordered_set<std::string_view> table_names;
  for (const auto& table : tables) {
    check(table_names.insert(table.name).second, "two tables are named '" + table.name + "'");
    check(table.group < num_groups, "table '" + table.name + "' is in no group");
    check_table(table);
    empty_table(table, groups);
  }
  check(servers >= 1 && servers <= kMaxServers, std::to_string(servers) + " servers are out of range");
  check(workers >= 1 && workers <= kMaxWorkers, std::to_string(workers) + " workers are out of range");
  check(chunk_bytes >= kMinChunkBytes && chunk_bytes <= kMaxChunkBytes, "chunk_bytes is out of range");
  check(total * static_cast<int64_t>(sizeof(double)) / static_cast<int64_t>(chunk_bytes) <= kMaxChunks,
        "it has too many chunks; raise chunk_bytes");
  check(heartbeat_ms >= 10 && timeout_ms >= 10, "heartbeat and timeout must be at least 0.01 s");
  check(norm_type > 0, "its norm's type is not positive");
}

std::string Plan::describe_difference(const Plan& other) const {
  const FlatLayout here(parameters, {}, int64_t{1} << 20, int64_t{1} << 20);
  const FlatLayout there(other.parameters, {}, int64_t{1} << 20, int64_t{1} << 20);
  std::string layouts = FlatLayout::describe_difference(here, there);
  if (!layouts.empty()) return layouts;
  if (group_of != other.group_of || groups.index() != other.groups.index()) {
    return "the optimizers or their parameter groups differ";
  }
  const size_t common = std::min(tables.size(), other.tables.size());
  for (size_t t = 0; t < common; ++t) {
    if (tables[t] == other.tables[t]) continue;
    return "table " + std::to_string(t) + ", '" + tables[t].name + "', differs from '" + other.tables[t].name +
           "' in its name, sizes, placement, optimizer, group or initial values, for which an embedding needs a seed";
  }
  if (tables.size() != other.tables.size()) {
    return "there are " + std::to_string(tables.size()) + " and " + std::to_string(other.tables.size()) + " tables";
  }
  if (servers != other.servers) {
    return "the job has " + std::to_string(servers) + " and " + std::to_string(other.servers) +
           " parameter servers; start as many as before, or begin anew with folders that are empty";
  }
  if (staleness != other.staleness) {
    const auto in_words = [](uint32_t steps) {
      return steps == kAnyStaleness ? std::string("any number of steps") : std::to_string(steps);
    };
    return "the staleness is " + in_words(staleness) + " and " + in_words(other.staleness);
  }
  if (chunk_bytes != other.chunk_bytes) return "the chunk sizes differ";
  if (norm_type != other.norm_type) return "the types of the norm differ";
  return "";
}

void Plan::check_groups(const FlatGroups& of_step) const {
  for (const auto& table : tables) {
    const bool is_same = of_step.index() == groups.index() &&
                         empty_table(table, of_step).state_width() == empty_table(table, groups).state_width();
    if (is_same) continue;
    throw InvalidArgument("the optimizer of table '" + table.name +
                          "' cannot change; keep the kind that the job began with");
  }
}

RowOptimizer row_optimizer_of(const TableSpec& table, const FlatGroups& groups) {
  const auto of_group = [&](const auto& list) -> RowOptimizer {
    if (table.group < list.size()) return list[table.group];
    throw InvalidArgument("a step comes with " + std::to_string(list.size()) + " parameter groups, and a table is in " +
                          "group " + std::to_string(table.group) + "; give all groups of the plan");
  };
  if (table.row_wise_adagrad) return rowwise_group_of(groups, table.group);
  return std::visit(of_group, groups);
}

RowTable empty_table(const TableSpec& table, const FlatGroups& groups) {
  return {table.num_rows, table.dim, table.initialiser, row_optimizer_of(table, groups)};
}

RowSharding sharding_of(const TableSpec& table, const Plan& plan) {
  return {table.placement, table.num_rows, static_cast<int>(plan.servers)};
}

RowStripes stripes_of(const TableSpec& table, const Plan& plan) {
  return {(table.num_rows + plan.servers - 1) / plan.servers, table.dim};
}

std::vector<Chunk> cut_chunks(const Plan& plan) {
  const auto bytes_of = [&](size_t p) {
    return static_cast<int64_t>(c10::elementSize(accumulation_dtype(plan.parameters[p].dtype)));
  };
  int64_t total = 0;
  for (size_t p = 0; p < plan.parameters.size(); ++p) total += numel_of(plan.parameters[p]) * bytes_of(p);
  const auto servers = static_cast<int64_t>(plan.servers);
  const auto end_of = [&](int64_t server) {
    return total / servers * (server + 1) + total % servers * (server + 1) / servers;
  };

  std::vector<Chunk> chunks;
  Cutter cutter(plan, chunks);
  int64_t server = 0;
  int64_t position = 0;  // in bytes
  for (size_t p = 0; p < plan.parameters.size(); ++p) {
    const int64_t numel = numel_of(plan.parameters[p]);
    const int64_t size = bytes_of(p);
    int64_t begin = 0;
    if (numel == 0) cutter.add(static_cast<int>(server), static_cast<int>(p), {0, 0});
    while (begin < numel) {
      int64_t end = numel;
      if (server + 1 < servers) {
        // The tile's edge that is nearest to where the share ends.
        const int64_t wanted = (end_of(server) - position) / size;
        end = std::min(numel, (std::max<int64_t>(wanted, 0) + kTile / 2) / kTile * kTile);
      }
      if (end > begin) cutter.add(static_cast<int>(server), static_cast<int>(p), {begin, end - begin});
      if (end < numel) ++server;
      begin = std::max(begin, end);
    }
    position += numel * size;
  }
  return chunks;
}

}  // namespace muster::server
