// Places of a chunk's pieces in each of its parts.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>

#include "optimizer/flat_optimizer.h"
#include "server/protocol/plan.h"
#include "server/protocol/protocol.h"

namespace muster::server {

/// In elements.
struct PartPlace {
  int64_t offset;
  int64_t numel;
};

/// "parameter", "state0", ...: of names in files.
const char* name_of(Part part);

PartPlace place_of(const Chunk& chunk, size_t piece, Part part);
at::ScalarType dtype_of(const Chunk& chunk, Part part);
int64_t numel_of(const Chunk& chunk, Part part);

/// Replaces a piece's part by `values` (1-dim); `parameter`: the piece's parameters, which `optimizer` steps.
void set_part(FlatOptimizer& optimizer, const at::Tensor& parameter, size_t piece, Part part, const at::Tensor& values);

}  // namespace muster::server
