// A chunk in snapshots.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <string>
#include <utility>

#include "muster/error.h"
#include "server/protocol/chunk_parts.h"
#include "server/shard/held_chunk.h"

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

HeldChunk::Image HeldChunk::image() {
  const auto lock = this->lock();
  Image image;
  image.made = record();
  if (const auto* const last = made()) {
    auto& partials = image.tensors[partials_name(plan_, chunk_)];
    partials = at::empty({static_cast<int64_t>(last->partials.size())}, at::kDouble);
    std::copy(last->partials.begin(), last->partials.end(), partials.mutable_data_ptr<double>());
  }
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const auto& piece = chunk_.pieces[i];
    for (const auto part : kParts) {
      const auto tensor = part_of(i, part);
      if (!tensor.defined()) continue;
      image.tensors[name_of(plan_, piece, part)] = tensor.clone();
    }
  }
  return image;
}

void HeldChunk::restore(const Image& image) {
  const at::NoGradGuard no_grad;
  const auto lock = this->lock();
  for (size_t i = 0; i < pieces_.size(); ++i) {
    for (const auto part : kParts) {
      const std::string name = name_of(plan_, chunk_.pieces[i], part);
      const auto found = image.tensors.find(name);
      if (found == image.tensors.end()) {
        const bool is_needed =
            part == Part::parameter || part == Part::steps || (part == Part::master && chunk_.dtype != chunk_.gradient);
        if (!is_needed) continue;
        throw CheckpointError("a snapshot lacks '" + name + "'; use an older snapshot");
      }
      if (found->second.numel() != place_of(chunk_, i, part).numel ||
          found->second.scalar_type() != dtype_of(chunk_, part)) {
        throw CheckpointError("a snapshot's '" + name + "' has another shape or dtype; use an older snapshot");
      }
      set_part(*optimizer_, pieces_[i], i, part, found->second.view({-1}));
    }
  }
  Statistics made;
  const auto partials = image.tensors.find(partials_name(plan_, chunk_));
  if (partials != image.tensors.end() && partials->second.scalar_type() == at::kDouble) {
    const auto* const first = partials->second.const_data_ptr<double>();
    made.step = image.made.steps;
    made.partials.assign(first, first + partials->second.numel());
  }
  HeldSums::restore(image.made, std::move(made));
}

}  // namespace muster::server
