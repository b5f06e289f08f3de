#include "window/host_buffers.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/view_as_complex.h>

#include "core/plain_memory.h"

namespace muster {

// Those of the replica that are merged with other replicas'.
const std::vector<at::Tensor>& HostBuffers::shared_buffers(size_t replica) const {
  static const std::vector<at::Tensor> none;
  return merges_ ? registry_.buffers(replica) : none;
}

void HostBuffers::open() {
  if (!is_noted_ || noted_.front().size() != shared_buffers(0).size()) note();
}

int64_t HostBuffers::num_doubles(size_t replica) const {
  int64_t count = 0;
  for (const auto& buffer : shared_buffers(replica)) count += is_averaged(buffer) ? num_reals(buffer) : 0;
  return count;
}

void HostBuffers::fill(const Tail& tail, size_t replica, double share) const {
  const auto& buffers = shared_buffers(replica);
  double* next_mean = tail.extra();
  for (size_t b = 0; b < buffers.size(); ++b) {
    tail.written()[b] = was_written(replica, b) ? 1 : 0;
    if (!is_averaged(buffers[b])) continue;
    auto target = doubles_like(buffers[b], next_mean);
    if (share > 0) target.copy_(as_real(buffers[b])).mul_(share);
    next_mean += num_reals(buffers[b]);
  }
}

at::Tensor HostBuffers::integers_of(size_t replica) const {
  std::vector<at::Tensor> integers{at::empty({0}, at::kLong)};
  for (const auto& buffer : shared_buffers(replica)) {
    if (!is_averaged(buffer)) integers.push_back(buffer.reshape({-1}).to(at::kLong));
  }
  return at::cat(integers);
}

void HostBuffers::merge(const Tail& tail, double divisor, bool adopts) {
  double* next_mean = tail.extra();
  int64_t offset = 0;
  for (size_t b = 0; b < shared_buffers(0).size(); ++b) {
    const auto& buffer = shared_buffers(0)[b];
    at::Tensor agreed;
    if (is_averaged(buffer)) {
      agreed = doubles_like(buffer, next_mean).div_(divisor);
      // In memory of its own, which is aligned for complex numbers.
      if (buffer.is_complex()) agreed = at::view_as_complex(agreed.clone());
      next_mean += num_reals(buffer);
    } else {
      agreed = integers_.front().narrow(0, offset, buffer.numel()).view(buffer.sizes());
      offset += buffer.numel();
    }
    // A buffer that nobody wrote keeps its bits, which the mean of equal values may not.
    if (tail.written()[b] == 0 && !adopts) continue;
    for (size_t r = 0; r < noted_.size(); ++r) {
      const auto& target = shared_buffers(r)[b];
      if (at::has_internal_overlap(target) != at::MemOverlap::Yes) target.copy_(agreed);
    }
  }
  note();
}

void HostBuffers::note() {
  is_noted_ = true;
  for (size_t r = 0; r < noted_.size(); ++r) {
    const auto& buffers = shared_buffers(r);
    noted_[r].resize(buffers.size());
    for (size_t b = 0; b < buffers.size(); ++b) {
      if (noted_[r][b].buffer.defined() && !was_written(r, b)) continue;
      noted_[r][b] = {buffers[b], buffers[b]._version(), buffers[b].detach().clone()};
    }
  }
}

bool HostBuffers::was_written(size_t replica, size_t buffer) const {
  const auto& noted = noted_[replica][buffer];
  const auto& current = shared_buffers(replica)[buffer];
  return !noted.buffer.is_same(current) || current._version() != noted.version || !noted.values.equal(current);
}

}  // namespace muster
