#include "window/server_values.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/flat_layout.h"
#include "core/ownership.h"
#include "device/host_copy.h"
#include "server/protocol/chunk_parts.h"
#include "window/server_cut.h"

namespace muster {

using server::Part;

namespace {

std::byte* first_byte_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); }

}  // namespace

at::Tensor part_of(const at::Tensor& parameter, const FlatOptimizer& optimizer, size_t position, Part part) {
  switch (part) {
    case Part::parameter:
      return parameter;
    case Part::steps:
      return optimizer.state().entry(position).step;
    case Part::master:
      return optimizer.state().entry(position).current(StateEntry::kMaster);
    default:
      return optimizer.state().tensor(position, static_cast<size_t>(part) - static_cast<size_t>(Part::state0));
  }
}

void ServerValues::add(const at::Tensor& parameter, size_t position) {
  parameters_.push_back({parameter, slot_strides(parameter.sizes().vec(), parameter.strides().vec()), position, {}});
}

void ServerValues::land() {
  for (uint32_t c = 0; c < client_.chunks().size(); ++c) {
    landing_.push_back(client_.allocate(client_.part_bytes(c, Part::parameter)));
  }
}

void ServerValues::give(const FlatOptimizer& optimizer, Part part) {
  for (uint32_t c = 0; c < client_.chunks().size(); ++c) {
    const auto& chunk = client_.chunks()[c];
    at::Tensor values;
    for (size_t i = 0; i < chunk.pieces.size(); ++i) {
      const auto& piece = chunk.pieces[i];
      const auto& parameter = parameters_[static_cast<size_t>(piece.parameter)];
      const auto whole = part_of(parameter.tensor, optimizer, parameter.position, part);
      if (!whole.defined()) continue;
      if (!values.defined()) values = at::zeros({server::numel_of(chunk, part)}, server::dtype_of(chunk, part));
      const auto [offset, count] = server::place_of(chunk, i, part);
      const auto place = values.narrow(0, offset, count);
      place.copy_(part == Part::steps ? whole.view({1}) : elements_of(in_slot_order(parameter, whole), piece.run));
    }
    if (values.defined()) client_.write(c, part, {first_byte_of(values), values.nbytes()});
  }
}

at::Tensor ServerValues::in_slot_order(const Parameter& parameter, const at::Tensor& values) {
  if (values.strides() == at::IntArrayRef(parameter.strides)) return values;
  return at::empty_strided(values.sizes(), parameter.strides, values.options().requires_grad(false))
      .copy_(values.detach());
}

void ServerValues::read(uint64_t at_least) { client_.read(Part::parameter, at_least, landing_); }

void ServerValues::adopt() {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> dense;
  for (const auto& [parameter, strides, position, trace] : parameters_) {
    dense.push_back(parameter.is_non_overlapping_and_dense()
                        ? parameter.detach()
                        : at::empty_strided(parameter.sizes(), strides, parameter.options().requires_grad(false)));
  }
  const auto& chunks = client_.chunks();
  std::vector<HostCopy> copies;
  for (size_t c = 0; c < chunks.size(); ++c) {
    const auto size = static_cast<int64_t>(c10::elementSize(chunks[c].dtype));
    for (const auto& piece : chunks[c].pieces) {
      copies.push_back({first_byte_of(dense[static_cast<size_t>(piece.parameter)]) + piece.run.begin * size,
                        landing_[c] + piece.offset * size, static_cast<size_t>(piece.run.count * size)});
    }
  }
  copy_all(copies);
  for (size_t p = 0; p < parameters_.size(); ++p) {
    const auto& parameter = parameters_[p].tensor;
    if (!parameter.is_non_overlapping_and_dense()) {
      parameter.detach().copy_(dense[p]);
    } else {
      parameter.unsafeGetTensorImpl()->bump_version();
    }
  }
  for (auto& each : parameters_) each.trace = WriteTrace::of(each.tensor);  // views of one tensor have one version
}

void ServerValues::note_overwritten() {
  for (size_t p = 0; p < parameters_.size() && !overwritten_; ++p) {
    if (has_other_values(p)) overwritten_ = p;
  }
}

bool ServerValues::hold_what_landed() {
  for (size_t p = 0; p < parameters_.size(); ++p) {
    if (parameters_[p].tensor.is_cpu() ? !has_landed_values(p) : has_other_values(p)) return false;
  }
  return true;
}

bool ServerValues::has_other_values(size_t p) {
  if (!was_written(p)) return false;
  if (!parameters_[p].tensor.is_cpu() || !has_landed_values(p)) return true;
  parameters_[p].trace = WriteTrace::of(parameters_[p].tensor);
  return false;
}

bool ServerValues::has_landed_values(size_t p) const {
  const at::NoGradGuard no_grad;
  const auto& parameter = parameters_[p];
  const auto dense = in_slot_order(parameter, parameter.tensor.detach());
  const auto& chunks = client_.chunks();
  for (size_t c = 0; c < chunks.size(); ++c) {
    const auto size = c10::elementSize(chunks[c].dtype);
    for (const auto& piece : chunks[c].pieces) {
      if (static_cast<size_t>(piece.parameter) != p) continue;
      const auto begin = static_cast<size_t>(piece.run.begin) * size;
      const auto bytes = static_cast<size_t>(piece.run.count) * size;
      if (begin + bytes > dense.nbytes()) return false;
      const auto* const landed = landing_[c] + static_cast<size_t>(piece.offset) * size;
      if (std::memcmp(first_byte_of(dense) + begin, landed, bytes) != 0) return false;
    }
  }
  return true;
}

bool ServerValues::was_written(size_t parameter) const {
  return WriteTrace::of(parameters_[parameter].tensor) != parameters_[parameter].trace;
}

bool ServerValues::is_row_major(size_t parameter) const {
  return muster::is_row_major(parameters_[parameter].tensor.sizes(), parameters_[parameter].strides);
}

std::vector<at::Tensor> ServerValues::fetch(Part part, uint64_t at_least, const std::vector<bool>& wanted) {
  const auto wants = [&](int parameter) { return wanted.empty() || wanted[static_cast<size_t>(parameter)]; };
  std::vector<at::Tensor> values;
  std::vector<std::byte*> places;
  for (uint32_t c = 0; c < client_.chunks().size(); ++c) {
    const auto& chunk = client_.chunks()[c];
    const bool is_wanted = std::ranges::any_of(chunk.pieces, wants, &server::Piece::parameter);
    values.push_back(is_wanted ? at::empty({server::numel_of(chunk, part)}, server::dtype_of(chunk, part))
                               : at::Tensor());
    places.push_back(is_wanted ? first_byte_of(values.back()) : nullptr);
  }
  const auto exists = client_.read(part, at_least, places);
  std::vector<at::Tensor> whole(parameters_.size());
  for (uint32_t c = 0; c < client_.chunks().size(); ++c) {
    if (!exists[c]) continue;
    const auto& chunk = client_.chunks()[c];
    for (size_t i = 0; i < chunk.pieces.size(); ++i) {
      const auto p = static_cast<size_t>(chunk.pieces[i].parameter);
      if (!wants(chunk.pieces[i].parameter)) continue;
      const auto [offset, count] = server::place_of(chunk, i, part);
      const auto piece = values[c].narrow(0, offset, count);
      if (part == Part::steps) {
        whole[p] = piece[0].clone();
        continue;
      }
      if (!whole[p].defined()) {
        whole[p] = at::empty_strided(parameters_[p].tensor.sizes(), parameters_[p].strides,
                                     at::TensorOptions(values[c].scalar_type()));
      }
      elements_of(whole[p], chunk.pieces[i].run).copy_(piece);
    }
  }
  return whole;
}

}  // namespace muster
