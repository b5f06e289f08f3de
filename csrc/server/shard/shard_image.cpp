// A shard's chunks in snapshots.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <string>

#include "muster/error.h"
#include "server/protocol/chunk_parts.h"
#include "server/shard/shard.h"

namespace muster::server {

namespace {

constexpr Part kParts[] = {Part::parameter, Part::state0, Part::state1, Part::state2, Part::master, Part::steps};
constexpr const char* kPartNames[] = {"parameter", "state0", "state1", "state2", "master", "steps"};

std::string partials_name(const Plan& plan, const Chunk& chunk) {
  const auto& first = chunk.pieces.front();
  return "partials/" + plan.parameters[static_cast<size_t>(first.parameter)].name + "/" +
         std::to_string(first.run.begin);
}

std::string name_of(const Plan& plan, const Piece& piece, Part part) {
  return std::string(kPartNames[static_cast<size_t>(part)]) + "/" +
         plan.parameters[static_cast<size_t>(piece.parameter)].name + "/" + std::to_string(piece.run.begin);
}

}  // namespace

Shard::Image Shard::image(uint32_t chunk) {
  auto& own = state(chunk);
  const auto lock = own.lock();
  Image image;
  image.made = own.record();
  if (own.made_partials) {
    auto& partials = image.tensors[partials_name(plan_, own.chunk)];
    partials = at::empty({static_cast<int64_t>(own.made_partials->size())}, at::kDouble);
    std::copy(own.made_partials->begin(), own.made_partials->end(), partials.mutable_data_ptr<double>());
  }
  for (size_t i = 0; i < own.pieces.size(); ++i) {
    const auto& piece = own.chunk.pieces[i];
    for (const auto part : kParts) {
      const auto tensor = part_of(own, i, part);
      if (!tensor.defined()) continue;
      image.tensors[name_of(plan_, piece, part)] = tensor.clone();
    }
  }
  return image;
}

void Shard::restore(uint32_t chunk, const Image& image) {
  const at::NoGradGuard no_grad;
  auto& own = state(chunk);
  const auto lock = own.lock();
  for (size_t i = 0; i < own.pieces.size(); ++i) {
    for (const auto part : kParts) {
      const std::string name = name_of(plan_, own.chunk.pieces[i], part);
      const auto found = image.tensors.find(name);
      if (found == image.tensors.end()) {
        const bool is_needed = part == Part::parameter || part == Part::steps ||
                               (part == Part::master && own.chunk.dtype != own.chunk.gradient);
        if (!is_needed) continue;
        throw CheckpointError("a snapshot lacks '" + name + "'; use an older snapshot");
      }
      if (found->second.numel() != place_of(own.chunk, i, part).numel ||
          found->second.scalar_type() != dtype_of(own.chunk, part)) {
        throw CheckpointError("a snapshot's '" + name + "' has another shape or dtype; use an older snapshot");
      }
      set_part(*own.optimizer, own.pieces[i], i, part, found->second.view({-1}));
    }
  }
  own.restore(image.made);
  const auto partials = image.tensors.find(partials_name(plan_, own.chunk));
  if (partials != image.tensors.end() && partials->second.scalar_type() == at::kDouble) {
    const auto* const first = partials->second.const_data_ptr<double>();
    own.made_partials.emplace(first, first + partials->second.numel());
  }
}

}  // namespace muster::server
