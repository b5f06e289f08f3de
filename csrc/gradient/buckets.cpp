#include "gradient/buckets.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "core/plain_memory.h"
#include "device/device.h"
#include "device/kernel_dtype.h"
#include "gradient/gradient_dtype.h"
#include "kernels/kernels.h"
#include "muster/error.h"

namespace muster {

namespace {

constexpr int64_t kAlignment = 256;  // of buckets, in bytes

int64_t align(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

c10::ScalarType travelling_dtype(const BucketSpec& bucket, const std::optional<at::ScalarType>& wire) {
  return wire && bucket.dtype == at::kFloat ? *wire : bucket.dtype;
}

int64_t travelling_bytes(const BucketSpec& bucket, const std::optional<at::ScalarType>& wire) {
  return bucket.numel * static_cast<int64_t>(c10::elementSize(travelling_dtype(bucket, wire)));
}

// Elements from `begin`, in bytes, on. No view of `bytes`: it counts its own versions.
at::Tensor part_of(const at::Tensor& bytes, int64_t begin, int64_t numel, c10::ScalarType dtype) {
  const auto offset = (bytes.storage_offset() + begin) / static_cast<int64_t>(c10::elementSize(dtype));
  return at::empty({0}, bytes.options().dtype(dtype)).set_(bytes.storage(), offset, {numel}, {1});
}

// A complex parameter lies in its bucket as real and imaginary parts.
ParameterSpec spec_of(const NamedParameter& parameter) {
  const auto tensor = as_real(parameter.tensor.detach());
  return {parameter.name, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

// Strides of dimensions of size 1 carry no meaning and differ between equal layouts.
bool same_memory_order(const at::Tensor& tensor, const std::vector<int64_t>& strides) {
  if (static_cast<size_t>(tensor.dim()) != strides.size()) return false;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) != strides[static_cast<size_t>(d)]) return false;
  }
  return true;
}

}  // namespace

void fill_wire(const Bucket& bucket) {
  if (!bucket.wire.defined() || bucket.wire_is_packed) return;
  if (is_streamed(bucket.sums.device())) {
    bucket.wire.copy_(bucket.sums);
    return;
  }
  kernels::narrow(kernel_dtype(bucket.wire.scalar_type()), bucket.wire.mutable_data_ptr(),
                  bucket.sums.const_data_ptr<float>(), static_cast<size_t>(bucket.sums.numel()));
}

void empty_wire(const Bucket& bucket) { empty_wire(bucket, {0, bucket.sums.numel()}); }

void empty_wire(const Bucket& bucket, const Run& run) {
  if (!bucket.wire.defined()) return;
  const auto wire = elements_of(bucket.wire, run);
  const auto sums = elements_of(bucket.sums, run);
  if (is_streamed(sums.device())) {
    sums.copy_(wire);
    return;
  }
  const kernels::PackItem item{wire.const_data_ptr(), kernel_dtype(wire.scalar_type()), sums.mutable_data_ptr(),
                               static_cast<size_t>(sums.numel())};
  kernels::pack(&item, 1, /*accumulate=*/false);
}

Buckets::Buckets(std::vector<NamedParameter> parameters)
    : parameters_(std::move(parameters)), layout_index_(parameters_.size()), views_(parameters_.size()) {
  for (size_t p = 0; p < parameters_.size(); ++p) layout_index_[p] = parameters_[p].has_rows ? -1 : 0;
}

bool Buckets::lay_out(const std::vector<int>& order, int64_t bucket_bytes, int64_t first_bucket_bytes,
                      int64_t last_bucket_bytes) {
  std::vector<ParameterSpec> specs;
  for (size_t p = 0; p < parameters_.size(); ++p) {
    if (!holds(p)) continue;
    layout_index_[p] = static_cast<int>(specs.size());  // as before, if the layout is
    specs.push_back(spec_of(parameters_[p]));
  }
  std::vector<int> layout_order;
  for (int p : order) {
    if (holds(static_cast<size_t>(p))) layout_order.push_back(layout_index_[static_cast<size_t>(p)]);
  }
  FlatLayout layout(std::move(specs), std::move(layout_order), bucket_bytes, first_bucket_bytes, last_bucket_bytes);
  if (layout.digest() == layout_.digest()) return false;
  layout_ = std::move(layout);
  buckets_.clear();
  for (auto& view : views_) view.reset();
  return true;
}

void Buckets::take_memory(comm::Communicator& communicator, const std::optional<at::ScalarType>& wire) {
  int64_t bytes = 0;
  for (const auto& spec : layout_.buckets()) bytes += align(travelling_bytes(spec, wire));
  if (memory_.defined() && memory_.numel() >= bytes) {
    memory_.zero_();
    return;
  }
  memory_.reset();  // there may be no room for both
  // Another layout may divide the same parameters into more buckets, of one parameter at the most.
  memory_ = communicator.allocate(bytes + kAlignment * static_cast<int64_t>(layout_.parameters().size()), at::kByte);
}

void Buckets::allocate(comm::Communicator& communicator, const std::optional<at::ScalarType>& wire) {
  buckets_.clear();
  take_memory(communicator, wire);
  int64_t begin = 0;
  for (const auto& spec : layout_.buckets()) {
    Bucket bucket;
    auto travelling = part_of(memory_, begin, spec.numel, travelling_dtype(spec, wire));
    begin += align(travelling_bytes(spec, wire));
    if (wire && spec.dtype == at::kFloat) {
      bucket.sums = at::zeros({spec.numel}, travelling.options().dtype(spec.dtype));
      bucket.wire = std::move(travelling);
    } else {
      bucket.sums = std::move(travelling);
    }
    buckets_.push_back(std::move(bucket));
  }
  std::vector<int> held;
  for (size_t p = 0; p < parameters_.size(); ++p) {
    views_[p].reset();
    if (!holds(p)) continue;
    held.push_back(static_cast<int>(p));
    const auto& sizes = layout_.parameters()[static_cast<size_t>(layout_index_[p])].sizes;
    const auto& sums = buckets_[static_cast<size_t>(slot(p).bucket)].sums;
    const auto view = sums.as_strided(sizes, slot(p).strides, sums.storage_offset() + slot(p).offset);
    // As `.grad` no view, which the zero_grad() of C++ refuses, and torch.compile cannot repeat of real numbers.
    views_[p] = (parameters_[p].tensor.is_complex() ? at::view_as_complex(view) : view).variable_data();
  }
  for (size_t b = 0; b < buckets_.size(); ++b) {
    for (int l : layout_.buckets()[b].parameters) buckets_[b].parameters.push_back(held[static_cast<size_t>(l)]);
  }
}

at::ScalarType Buckets::sums_dtype(size_t p) const {
  return layout_.buckets()[static_cast<size_t>(slot(p).bucket)].dtype;
}

bool Buckets::is_arranged(size_t p, const at::Tensor& gradient) const {
  const auto& place = slot(p);
  return gradient.layout() == at::kStrided && !is_lazy(gradient) && gradient.numel() == place.numel &&
         is_packed_from(gradient.scalar_type(), sums_dtype(p)) && same_memory_order(gradient, place.strides);
}

at::Tensor Buckets::arranged(size_t p, const at::Tensor& gradient) const {
  const auto& strides = slot(p).strides;
  auto dense = gradient.detach().to_dense();
  if (parameters_[p].tensor.is_complex()) dense = dense.to(parameters_[p].tensor.scalar_type());
  auto real = as_real(in_plain_memory(dense));
  if (const auto& sizes = layout_.parameters()[static_cast<size_t>(layout_index_[p])].sizes; real.sizes() != sizes) {
    throw InvalidArgument("parameter '" + parameters_[p].name + "' has a gradient of shape " +
                          c10::str(gradient.sizes()) + " in a window that began when it had shape " +
                          c10::str(view(p).sizes()) + "; give parameters another shape between windows");
  }
  if (!is_packed_from(real.scalar_type(), sums_dtype(p))) real = real.to(sums_dtype(p));
  if (same_memory_order(real, strides)) return real;
  return at::empty_strided(real.sizes(), strides, real.options()).copy_(real);
}

}  // namespace muster
