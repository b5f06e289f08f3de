#include "window/device_buffers.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <limits>
#include <utility>

#include "core/plain_memory.h"
#include "device/kernel_dtype.h"
#include "device/kernel_status.h"

namespace muster {

namespace {

// More words of integers are reduced by themselves: they are so many for each replica.
constexpr uint64_t kMostWords = uint64_t{1} << 16;

bool is_whole(const at::Tensor& buffer) { return at::isIntegralType(buffer.scalar_type(), /*includeBool=*/true); }

// Whether kernels may work on its memory.
bool is_served(const at::Tensor& buffer) {
  return find_kernel_dtype(c10::toRealValueType(buffer.scalar_type())) && buffer.is_contiguous() && !is_lazy(buffer);
}

at::ScalarType wide_dtype(const at::Tensor& buffer) {
  return is_whole(buffer) ? at::kLong : buffer.is_complex() ? at::kComplexDouble : at::kDouble;
}

kernels::cuda::BufferSegment segment_of(const at::Tensor& values) {
  kernels::cuda::BufferSegment segment{};
  segment.values = values.mutable_data_ptr();
  segment.n = static_cast<uint64_t>(num_reals(values));
  segment.dtype = kernel_dtype(c10::toRealValueType(values.scalar_type()));
  return segment;
}

}  // namespace

// The mean of equal values may have other bits.
void DeviceBuffers::open(const Tensors& buffers) {
  uint64_t count = 0;
  for (const auto& buffer : buffers) count += is_whole(buffer) ? 0 : static_cast<uint64_t>(num_reals(buffer));
  if (count == num_noted_ || count == 0) return;
  std::vector<at::Tensor> values;
  for (const auto& buffer : buffers) {
    if (!is_whole(buffer)) values.push_back(as_real(buffer).reshape({-1}).to(at::kDouble));
  }
  const auto bytes = static_cast<int64_t>(count * sizeof(double));
  noted_.reserve(static_cast<size_t>(bytes), values.front().device());
  noted_.tensor().narrow(0, 0, bytes).view(at::kDouble).copy_(at::cat(values));
  num_noted_ = count;
}

void DeviceBuffers::add_written(const Tensors& buffers, double* written) const {
  for (size_t b = 0; b < buffers.size(); ++b) {
    if (!is_whole(buffers[b])) continue;
    const bool is_known = b < versions_.size() && versions_[b].buffer.is_same(buffers[b]) &&
                          versions_[b].version == static_cast<int64_t>(buffers[b]._version());
    if (!is_known) written[b] += 1;
  }
}

// The same memory from window to window, as tables and CUDA graphs have its address.
at::Tensor DeviceBuffers::copy_of(size_t index, const at::Tensor& buffer) {
  if (copies_.size() <= index) copies_.resize(index + 1);
  auto& copy = copies_[index];
  const auto dtype = wide_dtype(buffer);
  if (!copy.defined() || copy.scalar_type() != dtype || copy.sizes() != buffer.sizes()) {
    copy = at::empty(buffer.sizes(), at::TensorOptions(dtype).device(buffer.device()));
  }
  return copy;
}

int64_t DeviceBuffers::begin(const Tensors& buffers, const double* written, int replicas) {
  parts_.clear();
  segments_.clear();
  num_averaged_ = num_integers_ = 0;
  replicas_ = replicas;
  for (size_t b = 0; b < buffers.size(); ++b) {
    const auto& buffer = buffers[b];
    if (buffer.numel() == 0 || (is_whole(buffer) && !(written[b] > 0))) continue;
    auto& part = parts_.emplace_back(Part{buffer, is_served(buffer) ? at::Tensor() : copy_of(b, buffer)});
    auto& segment = segments_.emplace_back(segment_of(part.copy.defined() ? part.copy : buffer));
    auto& place = is_whole(buffer) ? num_integers_ : num_averaged_;
    segment.place = place;
    place += segment.n;
  }
  const uint64_t words = 2 * num_integers_ * static_cast<uint64_t>(replicas);
  integers_ = at::Tensor();
  if (words > kMostWords) {
    integers_ = at::empty({static_cast<int64_t>(num_integers_)}, buffers.front().options().dtype(at::kLong));
  }
  return static_cast<int64_t>(2 * num_averaged_ + (integers_.defined() ? 0 : words));
}

// NaN is no value that a buffer was left with: everything counts as written then.
void DeviceBuffers::reserve_noted(c10::Device device) {
  const auto bytes = static_cast<int64_t>(num_averaged_ * sizeof(double));
  const auto* const before = noted_.data();
  noted_.reserve(static_cast<size_t>(bytes), device);
  if (noted_.data() != before || num_noted_ != num_averaged_) {
    noted_.tensor().narrow(0, 0, bytes).view(at::kDouble).fill_(std::numeric_limits<double>::quiet_NaN());
  }
  num_noted_ = num_averaged_;
  noted_.note_launch(device);
}

kernels::cuda::BufferPlan DeviceBuffers::plan_on(c10::Device device) {
  on_device_.follow(segments_, device);
  return {on_device_.items(), on_device_.chunks(), on_device_.num_chunks(), num_integers_};
}

kernels::cuda::BufferSums DeviceBuffers::arrays_of(const at::Tensor& sums) const {
  auto* const values = sums.mutable_data_ptr<double>();
  const bool has_words = !integers_.defined();
  return {.noted = static_cast<double*>(noted_.data()),
          .sums = values,
          .writers = values + num_averaged_,
          .words = has_words ? values + 2 * num_averaged_ : nullptr,
          .integers = has_words ? nullptr : integers_.mutable_data_ptr<int64_t>()};
}

void DeviceBuffers::gather(comm::Communicator& replicas, const at::Tensor& sums, const double* weight, Buffers policy) {
  if (parts_.empty()) return;
  const auto device = sums.device();
  reserve_noted(device);
  for (const auto& part : parts_) {
    if (part.copy.defined()) part.copy.copy_(part.buffer);
  }
  const bool is_mean = policy == Buffers::mean;
  const double share = is_mean || replicas.rank() == 0 ? 1 : 0;
  check_kernel(kernels::cuda::gather_buffers(plan_on(device), arrays_of(sums), is_mean ? weight : nullptr, share,
                                             replicas.rank(), replicas_, stream_handle(device)),
               "gathering buffers");
  if (!integers_.defined()) return;
  work_ = is_mean ? replicas.all_reduce(integers_, ReduceOp::max) : replicas.broadcast(integers_, 0);
}

void DeviceBuffers::wait() { std::exchange(work_, comm::Work()).wait(); }

void DeviceBuffers::merge(const Tensors& buffers, const at::Tensor& sums, const double* total_weight, Buffers policy) {
  if (!parts_.empty()) {
    const auto device = sums.device();
    noted_.note_launch(device);
    check_kernel(kernels::cuda::scatter_buffers(plan_on(device), arrays_of(sums), total_weight, policy == Buffers::mean,
                                                replicas_, stream_handle(device)),
                 "merging buffers");
  }
  for (const auto& part : parts_) {
    // An expanded one cannot be written, here or by anybody.
    if (at::has_internal_overlap(part.buffer) == at::MemOverlap::Yes) continue;
    if (part.copy.defined()) {
      part.buffer.detach().copy_(part.copy);
    } else {
      part.buffer.unsafeGetTensorImpl()->bump_version();
    }
  }
  versions_.clear();
  for (const auto& buffer : buffers) versions_.push_back({buffer, static_cast<int64_t>(buffer._version())});
}

}  // namespace muster
