#include "muster/batch.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "core/plain_memory.h"

namespace muster::detail {

namespace {
constexpr uintptr_t kAlignment = 64;
}

std::vector<int64_t> part_sizes(int64_t n, int parts, const std::vector<double>& capacities) {
  std::vector<int64_t> sizes(static_cast<size_t>(parts), n / parts);
  if (capacities.empty()) {
    for (int64_t larger = 0; larger < n % parts; ++larger) ++sizes[static_cast<size_t>(larger)];
    return sizes;
  }
  // D'Hondt's method: sample by sample to whoever finishes it first. Nobody ends below the whole part of its share.
  int64_t left = n;
  for (size_t part = 0; part < sizes.size(); ++part) {
    sizes[part] = static_cast<int64_t>(static_cast<double>(n) * capacities[part]);
    left -= sizes[part];
  }
  const auto finish = [&](size_t part) { return static_cast<double>(sizes[part] + 1) / capacities[part]; };
  for (; left > 0; --left) {
    size_t first = 0;
    for (size_t part = 1; part < sizes.size(); ++part) {
      if (finish(part) < finish(first)) first = part;
    }
    ++sizes[first];
  }
  return sizes;
}

at::Tensor aligned(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_meta() || is_lazy(tensor) ||
      tensor.numel() == 0) {
    return tensor;
  }
  if (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kAlignment == 0) return tensor;
  return tensor.clone();
}

at::Tensor placed_tensor(const at::Tensor& tensor, c10::Device device) {
  if (device.is_cpu() || !tensor.defined() || tensor.device() == device) return aligned(tensor);
  // From pageable memory the copy would wait for the stream.
  const bool is_pageable = tensor.device().is_cpu() && tensor.layout() == at::kStrided && !tensor.is_pinned();
  if (!is_pageable) return tensor.to(device, /*non_blocking=*/true);
  // Without gaps, and without memory that several elements share, to which nothing can be copied.
  const auto pinned = at::empty_like(tensor, tensor.options().pinned_memory(true));
  return pinned.copy_(tensor).to(device, /*non_blocking=*/true);
}

at::Tensor take_rows(const at::Tensor& tensor, int64_t start, int64_t stop, int64_t step) {
  if (!tensor.defined() || tensor.dim() == 0) return tensor;
  const auto rows = tensor.slice(0, start, stop, step);
  return step == 1 ? aligned(rows) : rows.clone(at::MemoryFormat::Contiguous);
}

std::string row_problem(const at::Tensor& tensor, int64_t rows, const std::string& path) {
  if (!tensor.defined() || tensor.dim() == 0) return {};
  if (tensor.layout() != at::kStrided || tensor.is_nested()) {
    return path + ": a " + c10::str(tensor.layout()) + " tensor cannot be divided";
  }
  if (tensor.size(0) == rows) return {};
  return path + ": a tensor of " + std::to_string(tensor.size(0)) + " rows (size(0)) in a batch of " +
         std::to_string(rows) + " cannot be divided";
}

}  // namespace muster::detail
