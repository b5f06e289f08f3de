#include "strategy/registration.h"

#include <ATen/ops/scalar_tensor.h>

#include <memory>
#include <string>
#include <utility>

#include "comm/peer_memory.h"
#include "device/kernel_status.h"
#include "embedding/row_source.h"
#include "embedding/table_contents.h"
#include "muster/error.h"

namespace muster {

namespace {

// On a device the first reductions set up connections and their time says little.
void choose_buckets(Session& session) {
  const auto& topology = session.topology();
  const auto& options = session.options();
  auto& groups = session.groups();
  if (options.bucket_bytes) {
    groups.buckets = buckets_of(*options.bucket_bytes);
    return;
  }
  if (topology.num_replicas == 1 || groups.servers) return;
  if (is_streamed(topology.devices.front())) {
    groups.buckets = device_buckets();
    return;
  }
  std::vector<LinkSpeed> links(topology.devices.size());
  session.pool().run([&](int local_replica) {
    const auto r = static_cast<size_t>(local_replica);
    links[r] = measure_link(*groups.gradients[r]);
  });
  groups.link = links.front();
  groups.buckets = muster::choose_buckets(links.front(), groups.gradients.front()->peer_memory() != nullptr);
}

}  // namespace

int add_module(Session& session, ModuleTensors module) {
  const auto pass = session.enter();
  for (const auto& [name, parameter] : module.parameters.front()) {
    if (session.groups().servers || !is_row_stub(parameter)) continue;
    throw InvalidArgument("the rows of '" + name +
                          "' were left to parameter servers (on_servers), which this strategy has not; use "
                          "ParameterServerStrategy, or leave on_servers out");
  }
  auto& registry = session.registry();
  const bool is_first = registry.num_parameters() == 0;
  const int number = registry.add(std::move(module), session.to_prepare());
  if (is_first) choose_buckets(session);
  return number;
}

void note_rows(Session& session, const at::Tensor& weight, EmbeddingRows rows) {
  const auto pass = session.enter();
  auto& registry = session.registry();
  const auto& groups = session.groups();
  const auto p = static_cast<size_t>(registry.find(weight));
  if (!groups.servers) {
    registry.note_rows(p, rows);
    return;
  }
  const auto seed = at::scalar_tensor(static_cast<int64_t>(rows.initialiser.seed), at::kLong);
  session.to_prepare().broadcast(seed, 0).wait();
  rows.initialiser.seed = static_cast<uint64_t>(seed.item<int64_t>());
  for (const auto& [name, agreed] : groups.servers->facts.row_seeds) {
    if (name == registry.name(p)) rows.initialiser.seed = agreed;
  }
  registry.note_rows(p, rows);
}

void expect_writes(Session& session, const at::Tensor& parameter) {
  const auto pass = session.enter();
  session.registry().expect_writes(static_cast<size_t>(session.registry().find(parameter)));
}

void begin_with(Session& session, int parameter, const RowInitialiser& initialiser, TableContents contents) {
  const auto pass = session.enter();
  auto& registry = session.registry();
  const auto p = static_cast<size_t>(parameter);
  const auto& weight = registry.parameter(0, p);
  const auto& [rows, values, states, steps] = contents;
  const bool fits = are_rows_of(rows, weight.size(0)) && are_of_rows(values, rows) && are_of_rows(states, rows) &&
                    values.size(1) == weight.size(1);
  if (!fits) {
    throw LayoutMismatch("the rows of '" + registry.name(p) + "' in the checkpoint are not of a table of " +
                         std::to_string(weight.size(0)) + " rows of " + std::to_string(weight.size(1)) +
                         " values; build the model that was saved");
  }
  auto noted = *registry.rows_of(p);
  noted.initialiser = initialiser;
  noted.contents = std::make_shared<const TableContents>(std::move(contents));
  registry.note_rows(p, noted);
}

void check_need_no_flat(const Session& session, const std::vector<int>& parameters) {
  for (const int index : parameters) {
    const auto p = static_cast<size_t>(index);
    const auto* const rows = session.registry().rows_of(p);
    if (rows == nullptr || !rows->row_wise_adagrad) continue;
    throw InvalidArgument("embedding '" + session.registry().name(p) +
                          "' has row_wise_adagrad, which needs a flat Adagrad; use that, or leave the option out");
  }
}

FlatOptimizer make_flat(const Session& session, const std::vector<std::pair<int, uint32_t>>& parameters,
                        const FlatGroups& groups) {
  const auto& registry = session.registry();
  std::vector<FlatParameter> flat;
  for (const auto& [index, group] : parameters) {
    const auto p = static_cast<size_t>(index);
    const auto* const rows = registry.rows_of(p);
    if (registry.parameter(0, p).is_complex()) {
      throw InvalidArgument("parameter '" + registry.name(p) +
                            "' is complex, and flat optimizers step real ones; use torch's own optimizer for it");
    }
    flat.push_back({registry.name(p), registry.parameter(0, p), group, rows != nullptr && rows->row_wise_adagrad});
  }
  const auto& topology = session.topology();
  const Shard shard = session.options().shard_optimizer ? Shard{topology.rank, topology.num_workers} : Shard{};
  return FlatOptimizer(std::move(flat), groups, shard);
}

}  // namespace muster
