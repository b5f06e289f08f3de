#include "server/shard/held_chunk.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "core/flat_layout.h"
#include "device/kernel_dtype.h"
#include "muster/error.h"
#include "server/protocol/chunk_parts.h"

namespace muster::server {

namespace {

Bytes bytes_of(const at::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()};
}

std::byte* data_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); }

}  // namespace

HeldChunk::HeldChunk(const Plan& plan, uint32_t index, Chunk chunk, Steps& rules)
    : HeldSums(rules), plan_(plan), index_(index), chunk_(std::move(chunk)) {
  memory_ = at::zeros({chunk_.numel}, chunk_.dtype);
  std::vector<FlatParameter> parameters;
  for (const auto& piece : chunk_.pieces) {
    pieces_.push_back(memory_.narrow(0, piece.offset, piece.run.count));
    const auto p = static_cast<size_t>(piece.parameter);
    parameters.push_back({plan_.parameters[p].name, pieces_.back(), plan_.group_of[p]});
  }
  optimizer_ = std::make_unique<FlatOptimizer>(std::move(parameters), plan_.groups);
}

HeldChunk::~HeldChunk() = default;

at::Tensor HeldChunk::part_of(size_t piece, Part part) const {
  switch (part) {
    case Part::parameter:
      return pieces_[piece];
    case Part::state0:
    case Part::state1:
    case Part::state2:
      return optimizer_->state().tensor(piece, static_cast<size_t>(part) - static_cast<size_t>(Part::state0));
    case Part::master:
      return optimizer_->state().entry(piece).current(StateEntry::kMaster);
    case Part::steps:
      return optimizer_->state().entry(piece).step.view({1});
  }
  throw InvalidArgument("a chunk has no such part; run one version of Muster on all workers and servers");
}

void HeldChunk::write(Part part, Bytes payload) {
  const at::NoGradGuard no_grad;
  const auto lock = this->lock();
  const auto dtype = dtype_of(chunk_, part);
  const int64_t numel = numel_of(chunk_, part);
  if (payload.size() != static_cast<size_t>(numel) * c10::elementSize(dtype)) {
    throw InvalidArgument("chunk " + std::to_string(index_) + "'s values have " + std::to_string(payload.size()) +
                          " bytes, not " + std::to_string(static_cast<size_t>(numel) * c10::elementSize(dtype)));
  }
  const auto values = at::empty({numel}, dtype);
  std::memcpy(values.mutable_data_ptr(), payload.data(), payload.size());
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const auto [offset, count] = place_of(chunk_, i, part);
    const auto piece = values.narrow(0, offset, count);
    set_part(*optimizer_, pieces_[i], i, part, piece);
  }
}

void HeldChunk::read(Part part, uint64_t at_least, Deadline deadline, const Consume& consume) {
  const auto lock = lock_after(at_least, deadline);
  if (part == Part::parameter) return consume(bytes_of(memory_), steps());
  at::Tensor values;
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const auto tensor = part_of(i, part);
    if (!tensor.defined()) continue;
    if (!values.defined()) values = at::zeros({numel_of(chunk_, part)}, dtype_of(chunk_, part));
    const auto [offset, count] = place_of(chunk_, i, part);
    values.narrow(0, offset, count).copy_(tensor);
  }
  consume(values.defined() ? bytes_of(values) : Bytes(), steps());
}

kernels::NormSum HeldChunk::add(uint64_t step, const std::vector<uint32_t>& members) {
  const auto dtype = kernel_dtype(chunk_.gradient);
  const size_t size = kernels::size_of(dtype);
  size_t tiles = 0;
  for (const auto& piece : chunk_.pieces) tiles += kernels::num_tiles(static_cast<size_t>(piece.run.count));
  partials_.assign(tiles, 0);
  double* partials = partials_.data();

  const bool is_alone = members.size() == 1;
  if (!is_alone && !sums_.defined()) sums_ = at::empty({chunk_.numel}, chunk_.gradient);
  std::byte* const sums = is_alone ? nullptr : data_of(sums_);
  const size_t num_ranks = members.empty() ? 0 : members.back() + 1;
  std::vector<const std::byte*> given(num_ranks);
  for (const uint32_t rank : members) given[rank] = find(step, rank)->parts.front().values.data();
  sum_ = is_alone ? given.back() : sums;
  std::vector<const void*> sources(num_ranks);
  for (const auto& piece : chunk_.pieces) {
    const size_t offset = static_cast<size_t>(piece.offset) * size;
    const auto n = static_cast<size_t>(piece.run.count);
    for (const uint32_t rank : members) sources[rank] = given[rank] + offset;
    if (members.empty()) {
      std::memset(sums + offset, 0, n * size);
    } else if (!is_alone && num_ranks <= kernels::kMaxReduceRanks) {
      const kernels::ReduceSegment segment{sources.data(), sums + offset, partials, n};
      kernels::reduce_stats(dtype, static_cast<int>(num_ranks), &segment, 1, plan_.norm_type);
    } else {
      void* destination = sums + offset;
      if (!is_alone) {
        kernels::tree_reduce(dtype, kernels::Reduction::sum, sources.data(), static_cast<int>(num_ranks), &destination,
                             1, n);
      }
      const kernels::StatsSegment segment{sum_ + offset, partials, n, dtype};
      kernels::grad_stats(&segment, 1, plan_.norm_type);
    }
    partials += kernels::num_tiles(n);
  }
  kernels::NormSum norm;
  for (const double partial : partials_) kernels::add_partial(norm, partial, plan_.norm_type);
  return norm;
}

void HeldChunk::step(const Apply& apply, const WorkerSums* given) {
  if (apply.scalars.finite == 0 || apply.scalars.dropped != 0) return;
  const at::NoGradGuard no_grad;
  const std::byte* const gradients = given != nullptr ? given->parts.front().values.data() : sum_;
  const auto size = static_cast<int64_t>(c10::elementSize(chunk_.gradient));
  std::vector<FlatGradient> sums(pieces_.size());
  for (size_t i = 0; i < pieces_.size(); ++i) {
    const auto& piece = chunk_.pieces[i];
    const auto parameter = static_cast<uint32_t>(piece.parameter);
    if (std::binary_search(apply.unused.begin(), apply.unused.end(), parameter)) continue;
    // Read alone: nothing is kept.
    auto* const values = const_cast<std::byte*>(gradients) + piece.offset * size;
    sums[i].dense = at::from_blob(values, {piece.run.count}, at::TensorOptions(chunk_.gradient));
  }
  optimizer_->step(std::move(sums), apply.groups, &apply.scalars, /*keep=*/false);
}

}  // namespace muster::server
