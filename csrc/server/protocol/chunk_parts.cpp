#include "server/protocol/chunk_parts.h"

namespace muster::server {

const char* name_of(Part part) {
  constexpr const char* kNames[] = {"parameter", "state0", "state1", "state2", "master", "steps"};
  return kNames[static_cast<size_t>(part)];
}

PartPlace place_of(const Chunk& chunk, size_t piece, Part part) {
  if (part == Part::steps) return {static_cast<int64_t>(piece), 1};
  return {chunk.pieces[piece].offset, chunk.pieces[piece].run.count};
}

at::ScalarType dtype_of(const Chunk& chunk, Part part) {
  if (part == Part::steps) return at::kFloat;
  return part == Part::parameter ? chunk.dtype : chunk.gradient;
}

int64_t numel_of(const Chunk& chunk, Part part) {
  return part == Part::steps ? static_cast<int64_t>(chunk.pieces.size()) : chunk.numel;
}

void set_part(FlatOptimizer& optimizer, const at::Tensor& parameter, size_t piece, Part part,
              const at::Tensor& values) {
  switch (part) {
    case Part::parameter:
      parameter.copy_(values);
      break;
    case Part::master:
      optimizer.state().set_master(piece, values);
      break;
    case Part::steps:
      optimizer.state().set_step_count(piece, values.item<float>());
      break;
    default:
      optimizer.state().set(piece, static_cast<size_t>(part) - static_cast<size_t>(Part::state0), values);
  }
}

}  // namespace muster::server
