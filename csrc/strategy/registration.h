// What prepare() registers with a strategy: modules, rows of embeddings, and flat optimizers over their parameters.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "optimizer/flat_optimizer.h"
#include "strategy/session.h"

namespace muster {

/// As ParameterRegistry::add. Before the first one the speed of the link is measured, unless options say how large
/// buckets are.
int add_module(Session& session, ModuleTensors module);

/// After add_module; collective over workers where there are servers, which will hold the rows: all workers get the
/// chief's seed, or the job's. See ParameterRegistry::note_rows. Throws InvalidArgument for rows that are not here
/// where there are no servers.
void note_rows(Session& session, const at::Tensor& weight, EmbeddingRows rows);

/// After add_module; see ParameterRegistry::expect_writes.
void expect_writes(Session& session, const at::Tensor& parameter);

/// Lets servers begin with rows of a checkpoint, whose `initialiser` gives all others. `parameter`: of the registry, a
/// weight whose rows are not here. To be called on every rank before the first step, with the same initialiser; the
/// chief's `contents` count. Throws LayoutMismatch for tensors of other shapes or dtypes than the table's, or rows that
/// do not ascend or are outside of it.
void begin_with(Session& session, int parameter, const RowInitialiser& initialiser, TableContents contents);

/// Throws InvalidArgument for parameters of the registry that only a flat optimizer steps as they ask: row-wise
/// Adagrad.
void check_need_no_flat(const Session& session, const std::vector<int>& parameters);

/// A flat optimizer over parameters of the registry, (index, group) by parameter; sharded as the options say. Throws
/// InvalidArgument for complex parameters.
FlatOptimizer make_flat(const Session& session, const std::vector<std::pair<int, uint32_t>>& parameters,
                        const FlatGroups& groups);

}  // namespace muster
