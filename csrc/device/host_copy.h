// Copies of much memory on the host.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <utility>
#include <vector>

namespace muster {

/// A run of bytes that overlaps none other.
struct HostCopy {
  void* to;
  const void* from;
  size_t bytes;
};

/// By all of at::parallel_for's threads, and past the caches where it is much.
void copy_all(const std::vector<HostCopy>& copies);

/// Copies each second tensor into the first one, of its sizes: what lies alike in the host's memory as bytes, the rest
/// as at::Tensor::copy_ does it.
void copy_all(const std::vector<std::pair<at::Tensor, at::Tensor>>& copies);

}  // namespace muster
