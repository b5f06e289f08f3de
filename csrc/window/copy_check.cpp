#include "window/copy_check.h"

#include <ATen/ops/empty.h>

#include <exception>

#include "device/device.h"
#include "device/kernel_status.h"
#include "kernels/cuda/cuda_kernels.h"

namespace muster {

namespace {

namespace cuda = kernels::cuda;

size_t units_of(const at::Tensor& tensor) { return (tensor.nbytes() + cuda::kCopyUnit - 1) / cuda::kCopyUnit; }

}  // namespace

// Memory for digests and the tables of one device; `sources`: of which its tensors are copies.
void CopyCheck::follow(OnOne& own, const std::vector<at::Tensor>& tensors, const std::vector<size_t>& which,
                       const std::vector<at::Tensor>* sources) {
  const auto device = tensors[which.front()].device();
  int64_t num_chunks = 0;
  for (const size_t p : which) num_chunks += static_cast<int64_t>(kernels::num_tiles(units_of(tensors[p])));
  if (!own.digests.defined() || own.digests.numel() < num_chunks) {
    own.digests = at::empty({num_chunks}, at::TensorOptions(at::kLong).device(device));
  }
  auto* digests = static_cast<uint64_t*>(own.digests.mutable_data_ptr());
  const auto* source_digests =
      sources == nullptr ? nullptr : static_cast<const uint64_t*>(devices_.front().digests.const_data_ptr());
  std::vector<cuda::CopySegment> segments;
  segments.reserve(which.size());
  for (const size_t p : which) {
    const auto& tensor = tensors[p];
    segments.push_back({tensor.mutable_data_ptr(), units_of(tensor), tensor.nbytes(), digests,
                        sources == nullptr ? nullptr : (*sources)[p].const_data_ptr(), source_digests});
    const size_t chunks = kernels::num_tiles(units_of(tensor));
    digests += chunks;
    if (source_digests != nullptr) source_digests += chunks;
  }
  own.segments.follow(segments, device);
}

void CopyCheck::mend(const std::vector<std::vector<at::Tensor>>& of_device, const std::vector<size_t>& which) {
  if (which.empty()) return;
  devices_.resize(of_device.size());
  const auto device_of = [&](size_t d) { return of_device[d][which.front()].device(); };
  const auto launch = [&](size_t d, const auto& kernel, const char* what) {
    const auto& table = devices_[d].segments;
    check_kernel(kernel(table.items(), table.chunks(), table.num_chunks(), stream_handle(device_of(d))), what);
  };
  for (size_t d = 0; d < of_device.size(); ++d) {
    const OnDevice on_device(device_of(d));
    follow(devices_[d], of_device[d], which, d == 0 ? nullptr : &of_device[0]);
    launch(d, cuda::digest_copies, "the digests of parameters");
  }
  for (size_t d = 1; d < of_device.size(); ++d) order_devices(device_of(0), device_of(d));
  std::exception_ptr failure;
  try {
    for (size_t d = 1; d < of_device.size(); ++d) {
      const OnDevice on_device(device_of(d));
      launch(d, cuda::mend_copies, "a copy of parameters");
    }
  } catch (...) {
    failure = std::current_exception();  // while others read the first device's memory, which may write it again below
  }
  for (size_t d = 1; d < of_device.size(); ++d) order_devices(device_of(d), device_of(0));
  if (failure) std::rethrow_exception(failure);
}

}  // namespace muster
