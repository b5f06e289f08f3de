// A chunk of parameters that a server owns: values, optimizer state, and the sums of what workers push of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "optimizer/flat_optimizer.h"
#include "server/protocol/plan.h"
#include "server/shard/held_sums.h"

namespace muster::server {

/// What an image calls a piece's part: "master/NAME/FIRST ELEMENT".
std::string name_in_image(const Plan& plan, const Piece& piece, Part part);

/// Thread-safe.
class HeldChunk final : public HeldSums {
 public:
  /// `index`: in cut_chunks(plan). `plan` and `rules` must outlive it.
  HeldChunk(const Plan& plan, uint32_t index, Chunk chunk, Steps& rules);
  ~HeldChunk() override;

  const Chunk& chunk() const noexcept { return chunk_; }

  /// As the functions of Shard with the same names.
  void write(Part part, Bytes payload);
  using Consume = std::function<void(Bytes values, uint64_t steps)>;
  void read(Part part, uint64_t at_least, Deadline deadline, const Consume& consume);

  /// The image is a copy, whose parts come together.
  std::unique_ptr<Image> begin_image() override;
  bool restore(const Image::Facts& facts, const checkpoint::NamedTensors& tensors) override;

 private:
  kernels::NormSum add(uint64_t step, const std::vector<uint32_t>& members) override;
  void step(const Apply& apply, const WorkerSums* given) override;
  /// A piece's part; undefined where there is no such state.
  at::Tensor part_of(size_t piece, Part part) const;

  const Plan& plan_;
  const uint32_t index_;
  const Chunk chunk_;
  // Guarded by lock():
  at::Tensor memory_;               // the parameters, with the gaps of chunk_
  std::vector<at::Tensor> pieces_;  // views of it
  std::unique_ptr<FlatOptimizer> optimizer_;
  at::Tensor sums_;                 // the sum of several members
  const std::byte* sum_ = nullptr;  // where it is: in `sums_`, or what the only member pushed
  std::vector<double> partials_;    // of it, by tile
};

}  // namespace muster::server
