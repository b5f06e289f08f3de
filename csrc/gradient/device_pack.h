// Packing of gradients into buckets on the current stream of a device.
#pragma once

#include <cstddef>
#include <vector>

#include "device/segments.h"
#include "gradient/buckets.h"
#include "gradient/packing.h"
#include "kernels/cuda/cuda_kernels.h"

namespace muster {

/// One launch a bucket, by plans that lie on the device. Owned by the replica thread.
class DevicePack {
 public:
  /// Plans for buckets that are allocated, and outlive this.
  DevicePack(const Buckets& buckets, c10::Device device);

  /// Enqueues the packing of `.grad` of a bucket's parameters and makes it undefined; one without counts as zeros. All
  /// of them are packed together: `again` where one's gradient came in two parts. Throws CommError as check_kernel
  /// does.
  void pack(size_t bucket, const Packing& packing, bool again, std::vector<GradientState>& states);

 private:
  struct Plan {
    std::vector<kernels::cuda::PackSlot> slots;  // with the dtypes that gradients came in last
    DeviceSegments<kernels::cuda::PackSlot> on_device;
  };

  const Buckets& buckets_;
  const c10::Device device_;
  std::vector<Plan> plans_;  // by bucket
};

}  // namespace muster
