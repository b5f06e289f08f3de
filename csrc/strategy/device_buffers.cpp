#include "strategy/device_buffers.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

namespace muster {

namespace {

DeviceBuffers::Tensors select(const DeviceBuffers::Tensors& buffers, bool floating) {
  DeviceBuffers::Tensors selected;
  for (const auto& buffer : buffers) {
    if (at::isFloatingType(buffer.scalar_type()) == floating) selected.push_back(buffer.detach());
  }
  return selected;
}

// End to end; undefined for none.
at::Tensor joined(const DeviceBuffers::Tensors& buffers, at::ScalarType dtype) {
  DeviceBuffers::Tensors flat;
  for (const auto& buffer : buffers) flat.push_back(buffer.reshape({-1}).to(dtype));
  return flat.empty() ? at::Tensor() : at::cat(flat);
}

void divide_up(const at::Tensor& values, const DeviceBuffers::Tensors& buffers) {
  DeviceBuffers::Tensors parts;
  int64_t offset = 0;
  for (const auto& buffer : buffers) {
    parts.push_back(values.narrow(0, offset, buffer.numel()).view(buffer.sizes()));
    offset += buffer.numel();
  }
  at::_foreach_copy_(buffers, parts);
}

}  // namespace

void DeviceBuffers::note(const Tensors& buffers) { noted_ = joined(select(buffers, true), at::kDouble); }

void DeviceBuffers::reduce(comm::Communicator& replicas, const Tensors& buffers, const at::Tensor& weight,
                           Buffers policy) {
  works_.clear();
  const auto values = joined(select(buffers, true), at::kDouble);
  if (values.defined()) {
    const bool comparable = noted_.defined() && noted_.numel() == values.numel();
    const auto written = comparable ? values.ne(noted_).to(at::kDouble) : at::ones_like(values);
    const auto share = policy == Buffers::mean ? weight
                       : replicas.rank() == 0  ? at::ones_like(weight)
                                               : at::zeros_like(weight);
    sums_ = at::cat({at::where(share.gt(0), values * share, at::zeros_like(values)), written});
    works_.push_back(replicas.all_reduce(sums_, ReduceOp::sum));
  }
  integers_ = joined(select(buffers, false), at::kLong);
  if (!integers_.defined()) return;
  works_.push_back(policy == Buffers::chief ? replicas.broadcast(integers_, 0)
                                            : replicas.all_reduce(integers_, ReduceOp::max));
}

void DeviceBuffers::wait() {
  for (auto& work : works_) work.wait();
  works_.clear();
}

void DeviceBuffers::merge(const Tensors& buffers, const at::Tensor& total_weight, Buffers policy) {
  const auto floating = select(buffers, true);
  const auto has_weight = total_weight.gt(0);
  if (!floating.empty()) {
    const auto values = joined(floating, at::kDouble);
    const int64_t n = values.numel();
    const auto sums = sums_.narrow(0, 0, n);
    const auto mean = policy == Buffers::chief ? sums : sums / total_weight;
    divide_up(at::where(sums_.narrow(0, n, n).gt(0).logical_and(has_weight), mean, values), floating);
  }
  const auto whole = select(buffers, false);
  if (!whole.empty()) divide_up(at::where(has_weight, integers_, joined(whole, at::kLong)), whole);
  note(buffers);
}

}  // namespace muster
