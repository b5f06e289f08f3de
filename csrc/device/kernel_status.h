// Header-only: the kernels room knows no exceptions.
#pragma once

#include <string>

#include "device/device.h"
#include "kernels/cuda/cuda_kernels.h"
#include "muster/error.h"

namespace muster {

/// Throws NotBuilt where this build has no CUDA, CommError where the device refused, InvalidArgument for a wrong
/// argument. `what` was enqueued.
inline void check_kernel(const kernels::cuda::Status& status, const char* what) {
  using Code = kernels::cuda::Status::Code;
  if (status.ok()) return;
  const std::string message = std::string(what) + ": " + status.problem;
  if (status.code == Code::not_built) throw NotBuilt(message);
  if (status.code == Code::invalid) throw InvalidArgument(message);
  throw CommError(message + "; an earlier kernel may be at fault: run with CUDA_LAUNCH_BLOCKING=1 to find it");
}

/// Whether what the calling thread enqueues on the device's current stream is captured into a CUDA graph.
inline bool is_capturing(c10::Device device) { return kernels::cuda::is_capturing(stream_handle(device)); }

}  // namespace muster
