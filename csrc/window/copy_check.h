// Copies of tensors that devices with peer access keep, compared with them by digests and mended.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "device/segments.h"

namespace muster {

/// Owned by the thread that steps, on whose current streams of the devices everything is enqueued.
class CopyCheck {
 public:
  /// Lets `of_device[d][p]`, for each p of `which` and each d but 0, be what `of_device[0][p]` is, whatever wrote
  /// either. They are alike, on a device for each d, all of which have peer access, and without gaps in memory. Reads
  /// each once, and what differs again; a launch or two for each device.
  void mend(const std::vector<std::vector<at::Tensor>>& of_device, const std::vector<size_t>& which);

 private:
  struct OnOne {
    DeviceSegments<kernels::cuda::CopySegment> segments;
    at::Tensor digests;  // int64, of all chunks
  };

  void follow(OnOne& own, const std::vector<at::Tensor>& tensors, const std::vector<size_t>& which,
              const std::vector<at::Tensor>* sources);

  std::vector<OnOne> devices_;
};

}  // namespace muster
