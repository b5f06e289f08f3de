#include "window/device_buffers.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/accumulate.h>

#include <algorithm>

#include "core/plain_memory.h"

namespace muster {

namespace {

bool is_whole(const at::Tensor& buffer) { return at::isIntegralType(buffer.scalar_type(), /*includeBool=*/true); }

// Floating and complex ones.
DeviceBuffers::Tensors averaged_of(const DeviceBuffers::Tensors& buffers) {
  DeviceBuffers::Tensors selected;
  for (const auto& buffer : buffers) {
    if (!is_whole(buffer)) selected.push_back(buffer.detach());
  }
  return selected;
}

// By dtype, in the order of the first of each: a run is converted at once, so that the number of launches does not
// depend on that of buffers.
std::vector<DeviceBuffers::Tensors> runs_of(const DeviceBuffers::Tensors& buffers) {
  std::vector<DeviceBuffers::Tensors> runs;
  for (const auto& buffer : buffers) {
    const auto is_alike = [&](const DeviceBuffers::Tensors& run) {
      return run.front().scalar_type() == buffer.scalar_type();
    };
    const auto run = std::find_if(runs.begin(), runs.end(), is_alike);
    (run == runs.end() ? runs.emplace_back() : *run).push_back(buffer);
  }
  return runs;
}

at::Tensor flat(const at::Tensor& values) { return values.is_contiguous() ? values.view({-1}) : values.reshape({-1}); }

// End to end, run by run; undefined for none. Memory of its own.
at::Tensor joined(const DeviceBuffers::Tensors& buffers, at::ScalarType dtype) {
  DeviceBuffers::Tensors converted;
  for (const auto& run : runs_of(buffers)) {
    DeviceBuffers::Tensors parts;
    for (const auto& buffer : run) parts.push_back(flat(as_real(buffer)));
    converted.push_back(at::cat(parts).to(dtype));
  }
  if (converted.empty()) return {};
  return converted.size() == 1 ? converted.front() : at::cat(converted);
}

// Replaces the buffers by values that lie as joined() leaves them.
void divide_up(const at::Tensor& values, const DeviceBuffers::Tensors& buffers) {
  int64_t offset = 0;
  for (const auto& run : runs_of(buffers)) {
    int64_t length = 0;
    for (const auto& buffer : run) length += buffer.numel() * (buffer.is_complex() ? 2 : 1);
    const auto own = values.narrow(0, offset, length).to(c10::toRealValueType(run.front().scalar_type()));
    offset += length;
    // torch writes those that lie alike in a few launches.
    DeviceBuffers::Tensors written;
    DeviceBuffers::Tensors parts;
    int64_t start = 0;
    for (const auto& buffer : run) {
      auto sizes = buffer.sizes().vec();
      if (buffer.is_complex()) sizes.push_back(2);
      const int64_t count = c10::multiply_integers(sizes);
      const auto part = own.narrow(0, start, count).view(sizes);
      start += count;
      // An expanded one cannot be written, here or by anybody.
      if (at::has_internal_overlap(buffer) == at::MemOverlap::Yes) continue;
      if (buffer.is_contiguous() && !is_lazy(buffer)) {
        written.push_back(as_real(buffer));
        parts.push_back(part);
      } else {
        buffer.copy_(buffer.is_complex() ? at::view_as_complex(part.clone()) : part);
      }
    }
    if (!written.empty()) at::_foreach_copy_(written, parts);
  }
}

}  // namespace

void DeviceBuffers::note(const Tensors& buffers) {
  noted_ = joined(averaged_of(buffers), at::kDouble);
  noted_others_.clear();
  for (const auto& buffer : buffers) noted_others_.push_back({buffer, static_cast<int64_t>(buffer._version())});
}

void DeviceBuffers::add_written(const Tensors& buffers, double* written) const {
  for (size_t b = 0; b < buffers.size(); ++b) {
    if (!is_whole(buffers[b])) continue;
    const bool is_known = b < noted_others_.size() && noted_others_[b].buffer.is_same(buffers[b]) &&
                          noted_others_[b].version == static_cast<int64_t>(buffers[b]._version());
    if (!is_known) written[b] += 1;
  }
}

void DeviceBuffers::reduce(comm::Communicator& replicas, const Tensors& buffers, const double* written,
                           const at::Tensor& weight, Buffers policy) {
  works_.clear();
  values_ = joined(averaged_of(buffers), at::kDouble);
  if (values_.defined()) {
    const bool comparable = noted_.defined() && noted_.numel() == values_.numel();
    const auto changed = comparable ? values_.ne(noted_).to(at::kDouble) : at::ones_like(values_);
    const auto share = policy == Buffers::mean ? weight
                       : replicas.rank() == 0  ? at::ones_like(weight)
                                               : at::zeros_like(weight);
    sums_ = at::cat({at::where(share.gt(0), values_ * share, at::zeros_like(values_)), changed});
    works_.push_back(replicas.all_reduce(sums_, ReduceOp::sum));
  }
  written_.clear();
  for (size_t b = 0; b < buffers.size(); ++b) {
    if (written[b] > 0) written_.push_back(buffers[b].detach());
  }
  integers_ = joined(written_, at::kLong);
  if (!integers_.defined()) return;
  works_.push_back(policy == Buffers::chief ? replicas.broadcast(integers_, 0)
                                            : replicas.all_reduce(integers_, ReduceOp::max));
}

void DeviceBuffers::wait() {
  for (auto& work : works_) work.wait();
  works_.clear();
}

void DeviceBuffers::merge(const Tensors& buffers, const at::Tensor& total_weight, Buffers policy) {
  const auto floating = averaged_of(buffers);
  const auto has_weight = total_weight.gt(0);
  if (!floating.empty()) {
    const int64_t n = values_.numel();
    const auto sums = sums_.narrow(0, 0, n);
    const auto mean = policy == Buffers::chief ? sums : sums / total_weight;
    divide_up(at::where(sums_.narrow(0, n, n).gt(0).logical_and(has_weight), mean, values_), floating);
    values_.reset();
  }
  if (!written_.empty()) divide_up(at::where(has_weight, integers_, joined(written_, at::kLong)), written_);
  note(buffers);
}

}  // namespace muster
