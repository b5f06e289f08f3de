// A chunk in snapshots.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "muster/error.h"
#include "server/protocol/chunk_parts.h"
#include "server/shard/held_chunk.h"
#include "server/shard/image.h"

namespace muster::server {

namespace {

constexpr Part kParts[] = {Part::parameter, Part::state0, Part::state1, Part::state2, Part::master, Part::steps};

class ChunkImage final : public Image {
 public:
  ChunkImage(Facts facts, checkpoint::NamedTensors tensors) : Image(std::move(facts)), tensors_(std::move(tensors)) {}

  checkpoint::NamedTensors next() override { return std::exchange(tensors_, {}); }

 private:
  checkpoint::NamedTensors tensors_;
};

}  // namespace

std::string name_in_image(const Plan& plan, const Piece& piece, Part part) {
  return std::string(name_of(part)) + "/" + plan.parameters[static_cast<size_t>(piece.parameter)].name + "/" +
         std::to_string(piece.run.begin);
}

std::unique_ptr<Image> HeldChunk::begin_image() {
  checkpoint::NamedTensors tensors;
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const auto& piece = chunk_.pieces[i];
    for (const auto part : kParts) {
      const auto tensor = part_of(i, part);
      if (!tensor.defined()) continue;
      tensors[name_in_image(plan_, piece, part)] = tensor.clone();
    }
  }
  return std::make_unique<ChunkImage>(facts_of_steps(), std::move(tensors));
}

bool HeldChunk::restore(const Image::Facts& facts, const checkpoint::NamedTensors& tensors) {
  const at::NoGradGuard no_grad;
  if (!tensors.contains(name_in_image(plan_, chunk_.pieces.front(), Part::parameter))) return false;
  const auto lock = this->lock();
  for (size_t i = 0; i < pieces_.size(); ++i) {
    for (const auto part : kParts) {
      const std::string name = name_in_image(plan_, chunk_.pieces[i], part);
      const auto found = tensors.find(name);
      if (found == tensors.end()) {
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
  restore_steps(facts);
  return true;
}

}  // namespace muster::server
